"""Everything that lets an unmodified Megatron-Core run on a CPU."""
