"""`megatron-rl plan`: what a run would hold, move and wait for on a cluster, from the model's config.json alone. No torch."""
