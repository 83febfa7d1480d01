"""Layers of the Megatron model that compute by the precision contract."""
