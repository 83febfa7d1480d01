"""Sampling: the rollout engines, generation of one turn or many, and the scored completions of a step."""
