"""The parts of tools/gpu_check.py. `found`, `rows`, `differences` and `table` need no GPU; each of the others is a process of its own,
`python -m gpu_parts.NAME --rows FILE`, that imports what only a GPU machine has inside functions."""
