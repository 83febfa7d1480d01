"""RMSNorm, and RMSNorm that quantizes its result."""
