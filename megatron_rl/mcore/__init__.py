"""Everything that knows Megatron-Core: the CPU platform, the layers, the model, the optimizer."""
