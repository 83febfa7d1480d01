"""The command `eval`: many completions per held-out problem, scored, with the statistics that such a sample allows.

statistics  estimators and intervals, pure          tallies   completions -> one record per problem -> tables
checkpoint  what the engine loads                   sampling  engine and reward workers, completions written as they come
"""
