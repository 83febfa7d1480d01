"""Checkpoints of a run: folder, write, load, optimizer and random state."""
