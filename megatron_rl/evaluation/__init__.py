"""The command `eval`: many completions per held-out problem, scored, with the statistics that such a sample allows."""
