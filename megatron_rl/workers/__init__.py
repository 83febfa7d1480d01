"""A pool of worker processes that isolates code which may hang, crash or run out of memory."""
