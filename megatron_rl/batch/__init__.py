"""Sampled answers as training samples, and their packed micro-batches."""
