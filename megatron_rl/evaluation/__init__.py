"""The command `eval`: many completions per held-out problem, scored, with the statistics that such a sample allows.

statistics  estimators and intervals, pure      tallies  completions -> one record per problem -> tables
checkpoint  what the engine is to load          sampling  engine and reward workers, completions written as they come
command     all of it, in order                 results, screen, page  eval.json read back, and its tables for people
"""
