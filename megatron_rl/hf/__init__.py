"""Hugging Face checkpoints and configurations: read, write, and what they say of a model."""
