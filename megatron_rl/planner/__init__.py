"""`megatron-rl plan`: estimates memory, traffic and time of a run on a cluster from the model's config.json alone, without torch."""
