"""The `eval` command: samples and scores several completions per held-out problem and computes their statistics."""
