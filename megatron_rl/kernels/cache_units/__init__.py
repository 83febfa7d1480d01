"""Queries, keys and values in units of an E4M3 cache's scales."""
