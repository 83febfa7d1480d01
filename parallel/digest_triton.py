"""Triton kernel that sums bytes on the GPU, so that hashing a gigabyte copies only a few kilobytes to the host.

Words of 32 bits are read 1024 at a time, in 1024 columns. Along its column, a run of 64 words is a polynomial mod 2^64:

    c = sum over j of word_j * STEP^(63 - j)        and a run has the sums        (sum of c_i * KEY_i, sum of c_i * KEY_(1024 + i)) mod 2^64

Every factor is odd, so one wrong word always changes both sums. So do two swapped words, because the difference of two powers of STEP is
never a multiple of 2^32. Integer sums do not depend on the order of additions. The sums detect corruption; they are not cryptographic.

This module imports Triton, which only GPU builds of torch include: import it inside functions.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

COLUMNS, RUN = 1024, 64
WORD = 4  # bytes


@triton.jit
def _odd_key(number):
    """Return an odd int64: the SplitMix64 hash of a number (Steele, Lea, Flood 2014)."""
    z = (number + 1) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (z ^ ((z >> 31) & 0x1FFFFFFFF)) | 1


@triton.jit
def sum_runs(words, sums, count, COLUMNS: tl.constexpr, RUN: tl.constexpr):
    """Sum one run of COLUMNS * RUN words per program. Words beyond `count` are zero."""
    run = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    column_sums = tl.zeros([COLUMNS], tl.int64)
    for row in range(RUN):
        index = (run * RUN + row) * COLUMNS + column
        word = tl.load(words + index, mask=index < count, other=0).to(tl.int64) & 0xFFFFFFFF
        column_sums = column_sums * 6364136223846793005 + word
    wide = column.to(tl.int64)
    tl.store(sums + 2 * run, tl.sum(column_sums * _odd_key(wide), axis=0))
    tl.store(sums + 2 * run + 1, tl.sum(column_sums * _odd_key(wide + COLUMNS), axis=0))


def run_sums(flat: torch.Tensor) -> torch.Tensor:
    """Return two sums for every 256 KiB of `flat`, uint8 [n], as int64 [runs, 2]. Trailing zeros do not change them, so hash n too."""
    if flat.numel() % WORD or flat.storage_offset() % WORD or flat.data_ptr() % WORD:
        flat = F.pad(flat, (0, -flat.numel() % WORD)).clone()
    words = flat.view(torch.int32)
    runs = -(-words.numel() // (COLUMNS * RUN))
    sums = torch.empty(runs, 2, dtype=torch.int64, device=flat.device)
    if runs:
        sum_runs[(runs,)](words, sums, words.numel(), COLUMNS=COLUMNS, RUN=RUN, num_warps=8)
    return sums
