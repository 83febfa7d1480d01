"""All that lets an unmodified Megatron-Core run on a CPU; a no-op on CUDA."""
