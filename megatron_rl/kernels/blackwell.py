"""Blackwell GPUs for data centers, whose tensor cores apply only powers of two as scales. Imports torch only inside."""

from parallel.formats import TensorFormat

BLACKWELL = 10
"""Major compute capability of B200, GB200, and B300."""


def is_blackwell() -> bool:
    """Return whether this machine's GPU is a Blackwell GPU for data centers (B200, GB200, B300)."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == BLACKWELL


def find_blackwell_problem(format: TensorFormat) -> tuple[str, str, str] | None:
    """Return (field of `precision`, rule, fix) for a format whose products Blackwell does not compute as the contract says, or None.

    Both libraries apply scales there in UE8M0, the exponent field of the FP32 scale. DeepGEMM packs it (`csrc/apis/layout.hpp`), and
    Transformer Engine copies it to the four MXFP8 scales of each group of 128 (`swizzle_block_scaling.cu`), with the same bytes. For powers
    of two this is the contract's number, and for any other scale it is up to 2 times smaller.
    """
    if format.block is None or format.block[0] == 1:  # a scale for each row is applied after the product
        return None
    if format.scale_format != "pow2":
        rule = "is not supported on Blackwell, whose tensor cores apply only the exponent of a block's scale"
        return "scale_format", rule, "use pow2"
    return None
