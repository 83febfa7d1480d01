"""Instructions, registers and shared memory of the kernels that quantize, read from code compiled for Hopper, without a GPU.

    PYTHONPATH=.:.venv/triton python tools/compile_kernels.py 90 --counts

Instructions are those of one thread in the machine code, slow paths of divisions included, divided by the thread's share of the values that
a program writes. A thread that has more than one tile of registers keeps others from running beside it.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ +)?(?!NOP)[A-Z][\w.]*.*;", re.MULTILINE)
_WIDTH, _TOKENS = 4096, 256  # of the launches; a tile has 128 x 128 values, a tile of rows 32 x 128
_TILE, _ROWS = 128 * 128, 32 * 128


class Count(NamedTuple):
    """What a compiled kernel takes."""

    per_value: float  # instructions
    warps: int
    registers: int  # of a thread
    spilled: int  # bytes
    shared: int  # bytes


def count(kernel: Any, values: int, architecture: int = 90) -> Count:
    """Return the counts of a compiled kernel whose programs write this many values."""
    from compile_kernels import assemble, disassemble

    code = disassemble(kernel)
    report, warps = assemble(kernel, architecture), kernel.metadata.num_warps
    registers, spilled = (int(re.search(pattern, report)[1]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))  # type: ignore[index]
    per_value = len(_INSTRUCTION.findall(code)) * 32 * warps / values
    return Count(per_value, warps, registers, spilled, kernel.metadata.shared)


def list_launches() -> Iterator[tuple[str, Callable[[], Any], dict[str, int]]]:
    """Yield each case with its launch, and the values that a program of each kernel writes."""
    from megatron_rl.kernels.experts.triton import pack
    from megatron_rl.kernels.norm.triton import quantize_norm
    from megatron_rl.kernels.quantize.triton import quantize_activation
    from megatron_rl.kernels.slices import WeightSlice
    from megatron_rl.kernels.slices.triton import find_maxima, quantize_slice
    from megatron_rl.kernels.swiglu.triton import quantize_swiglu
    from megatron_rl.kernels.transpose.triton import transpose_bytes
    from parallel.formats import FP8

    x = torch.zeros(_TOKENS, _WIDTH, dtype=torch.bfloat16)
    half, order = x[:, : _WIDTH // 2].contiguous(), torch.zeros(_TOKENS, 8, dtype=torch.int64)
    for scales in ("pow2", "fp32"):
        for name, rows, columns in (("both ways", True, True), ("rows", True, False), ("columns", False, True)):
            launch = partial(quantize_activation, x, scales, rows=rows, columns=columns)
            yield f"{name}, {scales}", launch, {"quantize_tile": _TILE if columns else _ROWS}
    for name, gradient in (("SwiGLU", None), ("SwiGLU's gradient", half)):
        for columns in (True, False):
            launch = partial(quantize_swiglu, x, gradient, "pow2", rows=True, columns=columns)
            values = (_TILE if columns else _ROWS) * (1 if gradient is None else 2)
            yield f"{name}, {'both ways' if columns else 'rows'}", launch, {"quantize_swiglu_tile": values}
    weight = WeightSlice(_TOKENS, _WIDTH, 0, FP8)
    yield "slice", lambda: find_maxima(x.float().view(-1), weight), {"find_tile_maxima": _ROWS}
    slice_of_data = torch.zeros(x.numel(), dtype=torch.float8_e4m3fn)
    yield "slice", lambda: quantize_slice(x.float().view(-1), weight, torch.zeros(2, 32), slice_of_data), {"quantize_slice_tile": _ROWS}
    yield "weight", lambda: transpose_bytes(slice_of_data.view(x.shape)), {"transpose_tile": _TILE}
    norm = partial(quantize_norm, x, x, x[0], 1e-6, "pow2", columns=True)
    yield "norm", norm, {"normalize_row": _WIDTH, "quantize_normed_tile": _TILE}
    yield "packed tokens", partial(pack, x, order, "pow2"), {"pack_token": _WIDTH}


def count_all(compiled: dict[str, list[Any]]) -> dict[str, Count]:
    """Return the counts of each case and kernel. `compiled` collects the kernels of each launch (`compile_kernels.intercept_launches`)."""
    counts = dict[str, Count]()
    for name, launch, values in list_launches():
        compiled.clear()
        launch()
        counts |= {f"{name}: {kernel}": count(each, values[kernel]) for kernel, (each,) in compiled.items()}
    return counts


def tabulate(counts: dict[str, Count]) -> str:
    """Return a table in Markdown."""
    lines = ["| kernel | instructions per value | warps | registers | spilled bytes | shared bytes |", "|---|---|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {each[0]:.1f} | " + " | ".join(map(str, each[1:])) + " |" for name, each in counts.items())])
