"""The orders in which the kernels that trainer and engine share add, read from code compiled for Hopper, without a GPU.

    PYTHONPATH=.:.venv/triton python tools/compile_kernels.py 90 --orders

A sum inside of a Triton kernel follows the layout of its operand over threads and warps, and a product follows its matrix instruction.
Triton chooses both for the arguments of a launch: the alignment of pointers, whether an integer is 1 or a multiple of 16, dtypes. So every
operator is launched as both sides launch it, for several numbers of rows and alignments, and all variants must have one order. This proves
nothing about instructions themselves, and nothing about libraries.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_rl.kernels.heads import Heads
from megatron_rl.kernels.rope.reference import Rotation

ROWS, ALIGNMENTS = (1, 2, 15, 16, 4096), (16, 8)
_ALIAS = re.compile(r"^(#\w+) = (.+)$", re.MULTILINE)
_REDUCE = re.compile(r'"tt\.reduce"\(.*?<\{axis = (\d+).*?\}>(.*?)\}\) : \((.*?)\) ->', re.DOTALL)
_DOT = re.compile(r"(?:tt\.dot|warp_group_dot)\s.*? : (.*)$", re.MULTILINE)
Variants = Iterator[tuple[str, Callable[[], Any]]]


class Order(NamedTuple):
    """How a compiled kernel adds."""

    sums: tuple[str, ...]  # axis and operand, with its layout, of each sum; maxima have no order
    products: tuple[str, ...]  # shapes and instruction of each matrix product
    fuses: bool  # whether a multiplication and an addition become one instruction
    split: int  # numbers that are summed by themselves, of kernels with such splits, else 0


def read_order(kernel: Any) -> Order:
    """Return the order of a compiled kernel."""
    text = re.sub(r" loc\(.*?\)$", "", kernel.asm["ttgir"], flags=re.MULTILINE)
    layouts = dict(_ALIAS.findall(text))
    resolve: Any = lambda operand: re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), operand)  # noqa: E731
    sums = tuple(f"axis {axis} of {resolve(resolve(operand))}" for axis, body, operand in _REDUCE.findall(text) if "addf" in body)
    products = []
    for operands in map(resolve, map(resolve, _DOT.findall(text))):
        shapes, instruction = re.findall(r"(?:memdesc|tensor)<([\dx]+\w+)", operands), re.search(r"nvidia_mma<\{.*?\}>", operands)
        products.append(f"{' '.join(shapes)} by {instruction[0] if instruction else 'no tensor core'}")
    constants = {kernel.src.fn.arg_names[place]: value for (place, *_), value in kernel.src.constants.items()}
    return Order(sums, tuple(products), kernel.metadata.enable_fp_fusion, constants.get("SPLIT", 0))


def find_differences(compiled: dict[str, list[Any]]) -> list[str]:
    """Return a line for each variant of an operator that adds in another order than the operator's first. `compiled` collects the kernels
    of each launch (`compile_kernels.intercept_launches`). Raise AssertionError for an operator whose order cannot be read."""
    differences = []
    for operator, variants in list_operators().items():
        first: tuple[str, Order] | None = None
        for name, launch in variants:
            compiled.clear()
            launch()
            orders = {kernel: read_order(each) for kernel, kernels in compiled.items() for each in kernels}
            orders = {kernel: order for kernel, order in orders.items() if order.sums or order.products}
            assert orders, f"{operator}, {name}: no sum was found"
            for kernel, order in orders.items():
                first = first or (f"{kernel}, {name}", order)
                if order != first[1]:
                    differences.append(f"{operator}: {kernel}, {name}, adds as {order}; {first[0]} as {first[1]}")
    return differences


def list_operators() -> dict[str, Variants]:
    """Return for each shared operator the launches of trainer and engine, by name. Sums of quantizers and SwiGLU have one number each."""
    widths = {f"norm of {width}": _vary(_launch_norms, width) for width in (128, 512, 896, 2048, 4096, 5120, 8192)}
    heads = {f"norms of heads of {dim}": _vary(_launch_heads, dim) for dim in (64, 128, 256)}
    softmax = {f"log-sum of {width}": _vary(_launch_log_sums, width) for width in (151936, 128256, 32001)}
    trees = {f"tree of {dtype}": _vary(_launch_trees, dtype) for dtype in (torch.bfloat16, torch.float8_e4m3fn)}
    attention = {f"attention of heads of {dim}": _vary(_launch_attention, dim) for dim in (64, 128, 256)}
    return widths | heads | softmax | trees | attention


def _vary(launches: Callable[[int, int, Any], dict[str, Callable[[], Any]]], size: Any) -> Variants:
    for rows, alignment in itertools.product(ROWS, ALIGNMENTS):
        for name, launch in launches(rows, alignment, size).items():
            yield f"{name}, {rows} rows at {alignment} bytes", launch


def _at(alignment: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return zeros whose address is a multiple of `alignment` bytes, and not of 16 if that is less."""
    skipped = alignment % 16 // dtype.itemsize
    return torch.zeros(torch.Size(shape).numel() + skipped, dtype=dtype)[skipped:].view(shape)


def _launch_norms(rows: int, alignment: int, width: int) -> dict[str, Callable[[], Any]]:
    from megatron_rl.kernels.norm import triton as norm

    x, weight = _at(alignment, rows, width), _at(alignment, width)
    plain = {f"sum {adds}": (x, x if adds else None, weight, 1e-6) for adds in (True, False)}
    launches: dict[str, Callable[[], Any]] = {name: partial(norm.normalize, *given) for name, given in plain.items()}
    if width % 128 == 0:
        for (name, given), scales in itertools.product(plain.items(), ("pow2", "fp32")):
            launches[f"quantized {scales} {name}"] = partial(norm.quantize_norm, *given, scales, columns=False)
            launches[f"engine {scales} {name}"] = partial(norm.quantize_norm, *given, scales, columns=False, result=x)
    return launches


def _launch_heads(rows: int, alignment: int, dim: int) -> dict[str, Callable[[], Any]]:
    from megatron_rl.kernels.heads import triton as heads

    tables = torch.zeros(64, dim // 2), torch.zeros(64, dim // 2), torch.zeros(rows, dtype=torch.int64)
    mixed, norms = _at(alignment, rows, 2 * (4 + 2) * dim), (_at(alignment, dim), _at(alignment, dim))
    query, key = (part.unflatten(1, (-1, dim)) for part in mixed.split([8 * dim, 2 * dim, 2 * dim], 1)[:2])
    return {
        "trainer": lambda: heads.rotate_heads(mixed, Heads(2, 4, Rotation(*tables, False), 1e-6), norms),
        "engine": lambda: heads.normalize_heads(query, key, norms, 1e-6),
        "engine, rotated": lambda: heads.normalize_and_turn_heads(query, key, norms, 1e-6, Rotation(*tables, False)),
    }


def _launch_log_sums(rows: int, alignment: int, vocabulary: int) -> dict[str, Callable[[], Any]]:
    from megatron_rl.kernels.vocabulary import triton as kernels
    from megatron_rl.kernels.vocabulary.reference import count_parts

    targets, launches = torch.zeros(min(rows, 16), dtype=torch.int64), dict[str, Callable[[], Any]]()
    for dtype, ranks in itertools.product((torch.bfloat16, torch.float32), (1, 2, 8) if vocabulary % 8 == 0 else (1,)):
        logits = _at(alignment, len(targets), vocabulary // ranks, dtype=dtype)
        launches[f"{dtype} tp {ranks}"] = partial(kernels.summarize, logits, targets, 1.0, count_parts(vocabulary, ranks))
    return launches


def _launch_trees(rows: int, alignment: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    from megatron_rl.kernels.sums import triton as sums

    x, weight = _at(alignment, rows, 4096, dtype=dtype), _at(16, 256, 4096, dtype=dtype)
    scales = () if dtype.itemsize > 1 else (torch.zeros(32, rows).t(), torch.zeros(2, 32))
    return {"product": lambda: sums.multiply_nodes(x, weight, *scales)}


def _launch_attention(rows: int, alignment: int, dim: int) -> dict[str, Callable[[], Any]]:
    from megatron_rl.kernels.split_attention import Sequences, pack
    from megatron_rl.kernels.split_attention import triton as kernels

    query, key, value = (_at(alignment, rows, count, dim) for count in (8, 2, 2))
    caches, numbers, sinks = (_at(16, 5000, 2, dim), _at(16, 5000, 2, dim)), torch.zeros(rows + 1, dtype=torch.int64), _at(alignment, 8)
    cached = Sequences(numbers, numbers[:-1], numbers[:-1], torch.zeros(rows, 5000, dtype=torch.int32), 5000, rows)
    launches: dict[str, Callable[[], Any]] = {}
    for beside, window in ((None, 0), (sinks, 128 if dim < 256 else 0)):
        kind = 1.0, beside, window
        packed = pack(torch.zeros(2, dtype=torch.int32), rows, rows)
        named = {"packed": (key, value, packed), "chunk": (*caches, cached), "decoded": (*caches, cached._replace(longest=1, splits=3))}
        launches |= {
            f"{name}, {'sinks' if kind[1] is not None else 'plain'}": partial(kernels.attend, query, *given, *kind)
            for name, given in named.items()
        }
    return launches
