"""The precision contract, the quantisers, the FP8 products and the precision graph."""
