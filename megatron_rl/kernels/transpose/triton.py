"""The Triton kernel of `kernels.transpose.reference`: tiles of 128 x 128 bytes; shared memory transposes words of four rows."""

import torch
import triton
import triton.language as tl

from megatron_rl.kernels.quantize.triton import LAUNCH, _number_tokens
from parallel.formats import BLOCK


@triton.jit
def transpose_tile(data, result, rows, width, words, TILE: tl.constexpr):
    """One program per tile of `data` [matrices, rows, width]; `result` int32 [matrices, width, words]."""
    first, matrix = tl.program_id(0).to(tl.int64) * TILE, tl.program_id(2).to(tl.int64)
    row, column = _number_tokens(first, TILE), tl.program_id(1) * TILE + tl.arange(0, TILE)
    source = data + (matrix * rows + row)[:, :, None] * width + column[None, None, :]
    read = tl.load(source, mask=(row < rows)[:, :, None] & (column < width)[None, None, :], other=0)
    packed = tl.sum(read.to(tl.int32) << (8 * tl.arange(0, 4))[:, None, None], axis=0)
    word = first // 4 + tl.arange(0, TILE // 4)
    target = result + (matrix * width + column)[:, None] * words + word[None, :]
    tl.store(target, tl.trans(packed), mask=(column < width)[:, None] & (word < words)[None, :])


def transpose_bytes(data: torch.Tensor, padding: int = 0) -> torch.Tensor:
    """Compute `kernels.transpose.reference.transpose_bytes`. Raise ValueError unless the result has whole words."""
    rows, width = data.shape[-2:]
    length = rows + padding
    if length % 4:
        raise ValueError(f"{rows} rows with padding {padding} are no multiple of 4")
    result = torch.empty(*data.shape[:-2], width, length, dtype=torch.uint8, device=data.device)
    if result.numel():
        source = data.contiguous().view(torch.uint8)
        grid = triton.cdiv(length, BLOCK), triton.cdiv(width, BLOCK), data.shape[:-2].numel()
        transpose_tile[grid](source, result.view(torch.int32), rows, width, length // 4, TILE=BLOCK, **LAUNCH)
    return result.view(data.dtype)
