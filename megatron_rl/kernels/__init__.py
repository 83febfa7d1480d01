"""Operators whose bits do not depend on the batch around a row.

Modules named `triton` are imported inside functions only: Triton comes with GPU builds of torch.
"""
