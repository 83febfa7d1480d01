"""Moves of tokens to their experts and back, and grouped products of all experts of a rank."""
