"""The cast to E4M3 in hardware and in software gives torch's bytes: all 2^32 float32 values on a GPU, a sample of each binade on a CPU."""

import torch
from support.kernel_tests import call_with_triton, needs_triton

_PART = 1 << 26


def sample_bits():
    """Return the first, last, middle and 61 more numbers of every binade and sign, and those next to E4M3's ties, as int32 bits."""
    high = torch.arange(512, dtype=torch.int64)[:, None] << 23
    drawn = torch.randint(1 << 23, (512, 61), generator=torch.Generator().manual_seed(0))
    ties = (torch.arange(16) << 19)[None, :, None] + torch.arange(-1, 2)[None, None, :]
    whole = torch.cat(
        [high + torch.tensor([0, 1, 1 << 22, (1 << 23) - 1]), high + drawn, (high[:, :, None] + ties).flatten(1)], 1
    ).flatten()
    whole = whole[: len(whole) // 4096 * 4096] % (1 << 32)
    return (whole - (whole >> 31 << 32)).int()


def count_wrong_in_interpreter():
    from support.e4m3_casts import count_wrong, hardware_cast

    bits = sample_bits()
    with hardware_cast():
        return len(bits), count_wrong(bits, False), count_wrong(bits, True)


@needs_triton
def test_both_casts_give_torchs_bytes(device):
    if device == "cpu":
        count, *wrong = call_with_triton(count_wrong_in_interpreter, interpret=True)
        assert count > 50_000 and wrong == [0, 0]
        return
    from support.e4m3_casts import count_wrong

    for first in range(-(1 << 31), 1 << 31, _PART):
        bits = torch.arange(first, first + _PART, device=device).int()
        assert [count_wrong(bits, hardware) for hardware in (False, True)] == [0, 0], first
