"""Checks of quantised activations against the reference quantiser, shared by the interpreter's test and the GPU's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.precision.fp8 import quantize_1x128, quantize_128x1


def uneven(tokens: int, width: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """[tokens, width]: sizes from 2^-20 to 2^20, so that a scale of the wrong block shows; zeros of both signs, exact rounding ties."""
    generator = torch.Generator().manual_seed(tokens + width)
    values = torch.randn(tokens, width, generator=generator)
    values *= torch.exp2(torch.randint(-20, 20, (tokens, 1), generator=generator).float())
    values[:, ::7] = values[:, ::7].sign() * torch.exp2(values[:, ::7].abs().clamp_min(1e-30).log2().round()) * 1.0625  # ties in E4M3
    values[:, 3::11] = 0.0
    values[:, 5::13] = -0.0
    return values.to(dtype).to(device)


def check_kernel(x: torch.Tensor, scale_format: str, groups: Sequence[int] | None = None) -> None:
    """`quantize_activation` of x: bytes, scales and layouts; asking for one half gives the same half."""
    from megatron_rl.precision.backends.triton_quantize import quantize_activation

    rows, columns = quantize_activation(x, scale_format, rows=True, columns=True, groups=groups)
    check_rows(rows, x, scale_format)
    for index, part in enumerate(torch.split(x, list(groups)) if groups else [x]):
        check_columns(_part(columns, x, groups, index), part, scale_format)
    alone, nothing = quantize_activation(x, scale_format, rows=True, columns=False, groups=groups)
    assert nothing is None and _same(alone, rows)
    nothing, alone = quantize_activation(x, scale_format, rows=False, columns=True, groups=groups)
    assert nothing is None and _same(alone, columns)


def check_into(x: torch.Tensor, scale_format: str) -> None:
    """`quantize_into` of x: bytes and scales, for the layouts that an engine's kernels ask for; nothing else is written."""
    from megatron_rl.precision.backends.triton_quantize import quantize_into

    for data, scale in engine_layouts(x):
        quantize_into(x, data, scale, scale_format)
        assert _same((data, scale), quantize_1x128(x, scale_format))


def engine_layouts(x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Empty E4M3 data [T, K] with float32 scales [T, K/128]: by rows, by columns, by columns aligned for TMA."""
    tokens, groups = x.shape[0], x.shape[1] // 128
    scales = [
        x.new_full((tokens, groups), -1, dtype=torch.float32),
        x.new_full((groups, tokens), -1, dtype=torch.float32).t(),
        x.new_full((groups, -(-tokens // 4) * 4), -1, dtype=torch.float32).t()[:tokens],
    ]
    return [(torch.empty_like(x, dtype=torch.float8_e4m3fn), scale) for scale in scales]


def check_rows(rows: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, scale_format: str) -> None:
    """Data [T, K] and scales [T, K/128] of Q_1x128(x), T contiguous and its stride a multiple of 4."""
    assert _same(rows, quantize_1x128(x, scale_format))
    assert not len(x) or (rows[0].is_contiguous() and rows[1].stride() == (1, -(-len(x) // 4) * 4))


def check_columns(columns: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, scale_format: str) -> None:
    """Data [K, T'] and scales [K, T'/128] of Q_128x1(x) transposed; the tokens added to T are zeros."""
    data, scale = quantize_128x1(x, scale_format)
    padding = columns[0].shape[1] - len(x)
    assert 0 <= padding < 128 and not columns[0][:, len(x) :].view(torch.uint8).any()
    assert _same((columns[0][:, : len(x)], columns[1]), (data.t(), scale.t()))
    assert columns[0].is_contiguous() and columns[1].stride(0) == 1


def _part(columns, x, groups, index):
    if groups is None:
        return columns
    width, before, length = x.shape[1], sum(groups[:index]), groups[index]
    data = columns[0][before * width :][: length * width].view(width, length)
    return data, columns[1][:, before // 128 : (before + length) // 128]


def _same(got: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    """Equal shapes and equal bits."""
    return all(
        a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(got, expected, strict=True)
    )
