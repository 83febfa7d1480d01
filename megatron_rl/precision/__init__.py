"""The precision contract, quantizers and precision graph."""
