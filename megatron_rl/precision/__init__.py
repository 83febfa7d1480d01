"""The precision contract, the quantizers, the FP8 products and the precision graph."""
