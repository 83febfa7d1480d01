"""Quantization of activations on a GPU; `precision.fp8` is the reference."""
