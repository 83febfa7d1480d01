"""Checks of what quantizes slices of weights and transposes weights: `kernels` is the module of the reference, which runs Triton's kernels
on a GPU, or of the kernels, for the interpreter."""

from itertools import pairwise

import torch

from megatron_rl.kernels.slices import WeightSlice
from megatron_rl.precision.quantizers import make_scales, quantize
from parallel.formats import FP8
from support.fp8_reference import uneven_matrix


def check_slices(kernels, rows, cols, cuts, ordered, scale_format, device="cpu"):
    """Check that the slices between `cuts` give the scales and bytes of the whole weight."""
    weight, format = uneven_matrix(rows, cols).to(device), FP8.with_scales(scale_format)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(device) if ordered else None
    held = [(weight.view(-1)[start:end], WeightSlice(rows, cols, start, format, order)) for start, end in pairwise(cuts)]
    scale, multipliers = make_scales(torch.stack([kernels.find_maxima(*each) for each in held]).amax(0), format)
    data = torch.full((weight.numel(),), -1.0, device=device).to(torch.float8_e4m3fn)
    for values, place in held:
        kernels.quantize_slice(values, place, multipliers, data[place.start : place.start + len(values)])
    ordered_rows = slice(None) if order is None else order
    wanted = quantize(weight[ordered_rows], format)
    found = data.view(torch.uint8).view(rows, cols)[ordered_rows]
    assert torch.equal(scale, wanted.scale) and torch.equal(found, wanted.data.view(torch.uint8)), (rows, cols, cuts, ordered, scale_format)


def check_transpose(kernels, shape, padding, device="cpu"):
    """Check the bytes and the padding."""
    data = torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    found = kernels.transpose_bytes(data.view(torch.float8_e4m3fn), padding)
    assert found.is_contiguous() and found.dtype == torch.float8_e4m3fn
    found = found.view(torch.uint8)
    assert torch.equal(found[..., : shape[-2]], data.mT) and not found[..., shape[-2] :].any(), (shape, padding)
