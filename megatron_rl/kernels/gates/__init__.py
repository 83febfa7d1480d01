"""Sigmoid and SiLU gates of attention, gated delta nets, and shared experts."""
