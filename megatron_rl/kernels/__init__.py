"""Operators whose bits do not depend on the batch around a row."""
