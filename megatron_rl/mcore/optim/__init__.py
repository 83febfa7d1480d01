"""The optimizer: gradient exchange, quantization after a step, offloading."""
