"""Hugging Face checkpoints: reading, writing, and what their config.json says."""
