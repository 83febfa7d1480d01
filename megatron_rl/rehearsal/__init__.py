"""`megatron-rl rehearse`: the trainer's GPU program, run rank by rank on tensors without data, to find what would fail, fill or wait."""
