"""Splitting, normalizing and rotating query and key heads."""
