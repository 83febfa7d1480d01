"""Products whose leaves are exact in FP32 in any order, so that tree sums can be compared bit by bit."""

import torch

from megatron_rl.kernels.sums import reference as tree


def dequantize(x, weight):
    """Return float32 `[T, K]` and `[N, K]` of data with scales `[T, K / 128]` and `[N / 128, K / 128]`."""
    rows = weight[1].repeat_interleave(128, 0)[: len(weight[0])]
    return x[0].float() * x[1].repeat_interleave(128, 1), weight[0].float() * rows.repeat_interleave(128, 1)


def make_operands(tokens, features, width, dtype):
    """Return `((x, weight), ())`, or in E4M3 `((x, weight), scales)`: small integers times a power of two for each leaf, so that sums of
    leaves are rounded, and another order of them rounds differently."""
    generator = torch.Generator().manual_seed(width)
    leaves = -(-width // 128)

    def draw_scales(rows):
        return torch.exp2(torch.randint(-14, 14, (rows, leaves), generator=generator).float())

    x, weight = (torch.randint(-4, 5, (rows, width), generator=generator).float() for rows in (tokens, features))
    if dtype == torch.float8_e4m3fn:
        scales = draw_scales(tokens), draw_scales(-(-features // 128)).t().contiguous().t()
        return (x.to(dtype), weight.to(dtype)), scales
    return ((x * draw_scales(1).repeat_interleave(128, 1)[:, :width]).to(dtype), weight.to(dtype)), ()


def check_kernel(tokens, features, width, device, dtype):
    """Check that `multiply_nodes` gives the bits of the reference on a CPU, for all rows, for a few, and for the added
    sums of 2, 4 and 8 ranks."""
    from megatron_rl.kernels.sums.triton import multiply_nodes

    operands, scales = make_operands(tokens, features, width, dtype)
    whole = tree.multiply(*(dequantize(*zip(operands, scales, strict=True)) if scales else operands))
    on_device = [tensor.to(device) for tensor in (*operands, *scales)]
    assert torch.equal(tree.add(multiply_nodes(*on_device).unbind()).cpu(), whole)
    few = [on_device[0][:3], on_device[1], *(scale[:3] if number == 0 else scale for number, scale in enumerate(on_device[2:]))]
    assert torch.equal(tree.add(multiply_nodes(*few).unbind()).cpu(), whole[:3])
    for ranks in (2, 4, 8):
        if width % (128 * ranks) == 0:
            shares = [[tensor.chunk(ranks, 1)[rank].contiguous() for tensor in on_device] for rank in range(ranks)]
            assert torch.equal(tree.add([tree.add(multiply_nodes(*share).unbind()) for share in shares]).cpu(), whole)
