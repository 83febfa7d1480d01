"""RMSNorm, with and without quantization of its result."""
