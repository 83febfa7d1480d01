"""UE8M0: a power-of-two scale as one byte, its FP32 exponent field. The values are those of the FP32 scale, so it is only another layout.

Blackwell's tensor cores read scales in this form. DeepGEMM's layout (`get_mn_major_tma_aligned_packed_ue8m0_tensor` in its
`csrc/jit_kernels/impls/smxx_layout.hpp`) has the scales of four neighboring groups of 128 in one int32, the first group in the lowest byte,
for each row of the matrix; rows are contiguous, and their number is padded to 4 in memory, because the tensor memory accelerator needs
strides of 16 bytes.
"""

import torch

from parallel.formats import BLOCK

GROUPS_PER_WORD = 4
_ROW_MULTIPLE = 4
_EXPONENT_BITS = 23


def is_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """Return bool of the shape of float32 `scale`: which values are positive, normal powers of two."""
    bits = scale.view(torch.int32)
    return (bits & 0x007FFFFF == 0) & (bits >= 1 << _EXPONENT_BITS) & (bits < 255 << _EXPONENT_BITS)


def pack_scales(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Return scales float32 `[..., B, G]` of a matrix in DeepGEMM's layout: int32 `[..., rows, G/4 rounded up]`, rows innermost. B is the
    number of rows, or of blocks of 128 rows. Missing groups of the last word are 0. Raise ValueError for scales that are not powers of
    two."""
    if bool((~is_ue8m0(scale)).any()):
        raise ValueError("scales that are not powers of two have no UE8M0 form")
    exponents = (scale.view(torch.int32) >> _EXPONENT_BITS).to(torch.uint8)
    if scale.shape[-2] != rows:
        exponents = exponents.repeat_interleave(BLOCK, -2)[..., :rows, :]
    exponents = torch.nn.functional.pad(exponents, (0, -exponents.shape[-1] % GROUPS_PER_WORD)).contiguous()
    words = exponents.view(torch.int32)
    packed = words.new_zeros(*words.shape[:-2], words.shape[-1], -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE)
    packed = packed.transpose(-1, -2)[..., :rows, :]
    return packed.copy_(words)
