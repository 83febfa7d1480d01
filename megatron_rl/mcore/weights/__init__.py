"""Weights in and out: checkpoints, exports, adapters, and what a sync sends."""
