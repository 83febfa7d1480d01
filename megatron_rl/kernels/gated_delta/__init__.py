"""The gated delta rule, a linear attention with a fixed state per sequence."""
