"""Rehearsal of an engine rank: SGLang on a fake GPU."""
