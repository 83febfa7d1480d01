"""Batch-invariant operators: the result for one token does not depend on how many tokens are computed with it, how far keys are padded,
or how many threads run. On a CPU trainer and engine both call them, so a pass over a whole batch gives the bits that prompts and
single decoded tokens gave.

MKL's matrix products use other kernels for few rows and split long sums by their length, also between threads. Measured with torch 2.13
on two kinds of AVX-512 machines and one with AVX2: from `MIN_ROWS` rows on, for sums of one length and in one thread, every row and every
column of a product has the same bits in any batch, at any position. With two threads that held on one of the first two only.

Attention of a decoded token has but a few rows, and how few get the bits of many is another thing on each kind of machine. So the cheapest
way that does is found by trying, once in a process (`_choose_scoring`).

BF16 products on a CPU with AMX are an exception: from 33 rows on, oneDNN cuts sums of `SPLIT_SUM` numbers or more at places that depend
on the number of rows, and one result in about 10,000 is another BF16 number. They run in tiles of at most `MAX_ROWS` rows. A large batch
then takes 2 to 4 times as long as in one product, a decoded token as long as before.

FP32 products of BF16 numbers (`bf16_operands`), which AMX computes too, are no exception from `MIN_AMX_COLUMNS` columns on: measured for
sums of 128 to 4,096 numbers, 16 to 600 rows, one thread and two.

Norms, SwiGLU, rotary positions and log-softmax work row by row and need no care. Sigmoids, which route GLM-4.5's and DeepSeek-V3's tokens,
differ in their last bit at the end of a tensor unless their number is a multiple of `SIGMOIDS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megatron_rl.precision import threads
from megatron_rl.precision.fp8 import append_zeros
from megatron_rl.precision.threads import all_threads, single_threaded

MIN_ROWS = 16
MAX_ROWS = 32
"""Of a BF16 product with sums of at least `SPLIT_SUM` numbers."""
SPLIT_SUM = 481
MIN_AMX_COLUMNS = 32
"""Of an FP32 product of BF16 numbers on a CPU with AMX: with up to 16 the bits depend on the number of rows."""
SIGMOIDS = 32
"""The vector loop's step: torch computes what is left at the end of a tensor by another formula."""
KEYS_PER_PRODUCT = 32
"""Keys that are summed in one product; padding with zeros up to a multiple of it changes no bit."""
_MIN_SHARED_COLUMNS = 64
"""Of a product for each thread: a single column has other bits."""
_QUERIES_PER_STEP = 64
_SHARED_PRODUCT = 1 << 20
"""Numbers of a weight from which threads share an FP32 product: below, starting them takes longer than they save."""
MAX_SCORES = 1 << 24
"""Attention scores in memory at a time."""
_backend: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@functools.cache
def has_amx() -> bool:
    """Return whether this machine's CPU has matrix units for BF16."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


@contextmanager
def bf16_operands(columns: int) -> Iterator[None]:
    """Tell torch that the operands of FP32 products are BF16 numbers; `columns` of a result. Matrix units then multiply them, 2 to 5 times
    faster on a CPU with AMX, and in all threads; sums and results stay FP32. Does nothing on other CPUs.

    The setting is the whole process's: no other thread may multiply meanwhile.
    """
    if not has_amx() or columns < MIN_AMX_COLUMNS:
        yield
        return
    before = _backend.fp32_precision
    _backend.fp32_precision = "bf16"
    try:
        with all_threads():
            yield
    finally:
        _backend.fp32_precision = before


def apply_with_min_rows(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return function(x) for a function from [T, K] to [T, N] and x [..., K]. On a CPU the function gets a matrix of at least `MIN_ROWS`
    rows and runs in one thread, or with `bf16_operands` in all."""
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        return function(rows).unflatten(0, x.shape[:-1])
    with nullcontext() if _backend.fp32_precision == "bf16" else single_threaded():
        return function(append_zeros(rows, -2, MIN_ROWS - len(rows)))[: len(rows)].unflatten(0, x.shape[:-1])


def apply_product(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Do `apply_with_min_rows` for a `product` of rows [T, K] with some matrix, in tiles where BF16 needs them."""
    if x.is_cuda or x.dtype != torch.bfloat16 or x.shape[-1] < SPLIT_SUM:
        return apply_with_min_rows(product, x)
    return apply_with_min_rows(lambda rows: torch.cat([apply_with_min_rows(product, tile) for tile in rows.split(MAX_ROWS)]), x)


def invariant_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x . W^T; x [..., K] and weight [N, K] of one dtype, result [..., N]."""
    return apply_product(lambda rows: _multiply(rows, weight), x)


def _multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows . W^T. Threads share the columns of a large FP32 product, each with the bits of one thread."""
    shared = rows.dtype == torch.float32 and weight.numel() >= _SHARED_PRODUCT and not rows.is_cuda
    if not shared or _backend.fp32_precision == "bf16" or (torch.is_grad_enabled() and (rows.requires_grad or weight.requires_grad)):
        return rows @ weight.t()
    result = rows.new_empty(len(rows), len(weight))
    rows, weight = rows.detach(), weight.detach()  # other threads record gradients
    threads.run_in_parts(lambda part: torch.mm(rows, weight[part].t(), out=result[:, part]), len(weight), _MIN_SHARED_COLUMNS)
    return result


class _HeadProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        products = [invariant_matmul(*pair) for pair in zip(x.movedim(-2, 0).contiguous(), weight.contiguous(), strict=True)]
        return torch.stack(products, -2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return torch.einsum("...hn,hnk->...hk", gradient, weight), torch.einsum("...hn,...hk->hnk", gradient, x)


def multiply_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return for every head `invariant_matmul` with a weight of its own, with gradient; x [..., h, K], weight [h, N, K], result
    [..., h, N]."""
    return _HeadProducts.apply(x, weight)


class InvariantMatmuls(TorchFunctionMode):
    """Within the context, `torch.matmul(x, weight.t())` and `F.linear(x, weight)` are `invariant_matmul(x, weight)`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.matmul:
            return invariant_matmul(args[0], args[1].t())
        if function is F.linear and args[2:] in ((), (None,)) and not kwargs:
            return invariant_matmul(args[0], args[1])
        return function(*args, **(kwargs or {}))


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + exp(-x)), float32 of any shape."""
    if x.is_cuda:
        return torch.sigmoid(x)
    with single_threaded():
        return append_zeros(x.reshape(-1), -1, -x.numel() % SIGMOIDS).sigmoid()[: x.numel()].view(x.shape)


class InvariantRouting(InvariantMatmuls):
    """Within the context, a router's logits (`torch.mm(x, weight.t())`) are `invariant_matmul`, and its sigmoids `sigmoid`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.mm:
            return invariant_matmul(args[0], args[1].t())
        if function in (torch.sigmoid, torch.Tensor.sigmoid):
            return sigmoid(args[0])
        return super().__torch_function__(function, types, args, kwargs)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight in FP32, rounded once to x's dtype. x [..., K], weight [K]."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, last: torch.Tensor, scale: float) -> torch.Tensor:
    """Return softmax(scale q k^T) v in FP32, where each query sees the keys up to its own index in `last`. No gradient.

    query [b, h, s, d], key [b, g, t, d], value [b, g, t, e], grouped-query heads where g < h, `last` int64 [b, s] below t.
    Returns [b, h, s, e] in query's dtype. Keys that no query sees must be finite.
    """
    batch, heads, queries, _ = query.shape
    groups = key.shape[1]
    key, value = (append_zeros(x.float(), -2, -x.shape[2] % KEYS_PER_PRODUCT) for x in (key, value))
    result = query.new_empty(batch, heads, queries, value.shape[-1])
    step = min(_QUERIES_PER_STEP, max(1, MAX_SCORES // (batch * heads * key.shape[2])))
    for start in range(0, queries, step):
        part = slice(start, start + step)
        rows = query[:, :, part].float().mul(scale).reshape(batch, groups, -1, query.shape[-1])
        attended = _attend(rows, key, value, last[:, part])
        result[:, :, part] = attended.reshape(batch, heads, -1, value.shape[-1])
    return result


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """`attention` of few queries, already scaled, the heads of a group one after the other: [b, g, heads * s, d] to [b, g, heads * s, e].

    Keys are summed in chunks of `KEYS_PER_PRODUCT`, in order: chunks beyond a query's last key add zero to it.
    """
    rows, scoring = query.shape[2], _choose_scoring()
    length = (int(last.max()) // KEYS_PER_PRODUCT + 1) * KEYS_PER_PRODUCT
    scores = scoring.score(append_zeros(query, -2, scoring.min_rows - rows), key[:, :, :length])
    masked = torch.arange(length) > last[:, None, None, :, None]
    scores[:, :, :rows].unflatten(2, (-1, last.shape[1])).masked_fill_(masked, -torch.inf)
    weights = scores.softmax(-1)
    chunks = zip(weights.split(KEYS_PER_PRODUCT, -1), value[:, :, :length].split(KEYS_PER_PRODUCT, 2), strict=True)
    total, *others = (part @ values for part, values in chunks)
    for other in others:
        total += other
    return total[:, :, :rows]


@dataclass(frozen=True)
class _Scoring:
    """How attention of few queries multiplies: with at least `min_rows` rows, those of few by `keys_left` with keys as the left matrix."""

    min_rows: int
    keys_left: bool = False

    def score(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return q k^T [b, g, rows, t]."""
        if not self.keys_left or query.shape[2] >= MIN_ROWS:
            return query @ key.transpose(-1, -2)
        return (key @ query.transpose(-1, -2)).transpose(-1, -2).contiguous()

    def is_invariant(self) -> bool:
        """Tell whether few rows get the bits of many here, on numbers that an other order of sums would show."""
        numbers = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(1, 1, size, 128, generator=numbers) for size in (2 * MIN_ROWS, 128, KEYS_PER_PRODUCT))
        scores = query @ key.transpose(-1, -2)
        weights = scores[..., :KEYS_PER_PRODUCT].softmax(-1)
        attended = weights @ value
        return all(
            torch.equal(self.score(query[:, :, :rows], key), scores[:, :, :rows])
            and torch.equal(weights[:, :, :rows] @ value, attended[:, :, :rows])
            for rows in range(self.min_rows, MIN_ROWS)
        )


@functools.cache
def _choose_scoring() -> _Scoring:
    """Return what gives few queries the bits of many on this machine: AVX-512 does with keys at the left, which reads them once, AVX2 from
    four rows on."""
    with single_threaded():
        return next(scoring for scoring in (_Scoring(2, keys_left=True), _Scoring(4), _Scoring(MIN_ROWS)) if scoring.is_invariant())


def attention_gradients(inputs: tuple[torch.Tensor, ...], gradient: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Return the gradients of `causal_attention`'s inputs: those of torch's fused attention, so no scores are saved between the passes, nor
    all made at once within one."""
    query, key, value = inputs = tuple(x.detach().requires_grad_() for x in inputs)
    with torch.enable_grad():
        wide = append_zeros(value, -1, query.shape[-1] - value.shape[-1])  # it requires one width of all three, else it is not fused
        result = F.scaled_dot_product_attention(query, key, wide, is_causal=True, scale=scale, enable_gqa=True)[..., : value.shape[-1]]
    return torch.autograd.grad(result, inputs, gradient)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale = scale
        batch, _, tokens, _ = query.shape
        return attention(query, key, value, torch.arange(tokens).expand(batch, tokens), scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *attention_gradients(ctx.saved_tensors, gradient, ctx.scale), None


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Return `attention` of every token to itself and those before it, with gradient; shapes as there with s = t, scale 1 / sqrt(d) for
    None."""
    return _CausalAttention.apply(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)
