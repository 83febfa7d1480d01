"""A pool of worker processes for user code."""
