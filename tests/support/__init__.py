"""Helpers of the tests with real parts: processes with bounded lives, rank worlds, tiny checkpoints, the trainer's side."""
