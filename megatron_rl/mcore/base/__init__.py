"""What every other folder of `mcore` builds on: names of modules, turns of two micro-batches, their exchanges, and gradients of weights."""
