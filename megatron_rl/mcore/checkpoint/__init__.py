"""Checkpoints of a run: the folder, saving and loading, optimizer state, random state, and weights for export."""
