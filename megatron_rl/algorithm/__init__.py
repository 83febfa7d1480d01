"""Advantages from rewards, and losses from log-probs: one piece per file, combined by the config."""
