"""`megatron-rl rehearse`: runs the trainer's GPU program rank by rank on tensors without data, to find errors, memory use and waits."""

import megatron_rl.mcore  # before a module imports Megatron
