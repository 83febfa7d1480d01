"""Layers of the Megatron model that follow the precision contract."""
