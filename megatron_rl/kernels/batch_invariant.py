"""Batch-invariant operators for CPUs: the result for a token does not depend on the number of tokens in the batch, the padding of keys, or
the number of threads. Trainer and engine both call them on a CPU, so a pass over a whole batch gives the bits of prompts and single decoded
tokens.

MKL uses different kernels for few rows and splits long sums by their length and between threads. Measured with torch 2.13 on two kinds of
AVX-512 machines and one with AVX2: with at least `MIN_ROWS` rows, sums of equal length and one thread, every row and column of a product
has the same bits in any batch and at any position. With two threads, this held on one AVX-512 machine only.

BF16 products on a CPU with AMX are an exception: with 33 rows or more, oneDNN splits sums of at least `SPLIT_SUM` numbers at places that
depend on the number of rows, and about one result in 10,000 changes. They run in tiles of at most `MAX_ROWS` rows. A large batch then takes
2 to 4 times as long as in one product; a decoded token takes no longer.

Norms, SwiGLU, rotary positions and log-softmax are computed row by row and are invariant. Sigmoids, which route tokens in GLM-4.5 and
DeepSeek-V3, SiLU, and softplus differ in their last bit at the end of a tensor unless their number is a multiple of `VECTOR_STEP`.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megatron_rl.kernels import plain
from megatron_rl.precision import threads
from megatron_rl.precision.fp8 import append_zeros
from megatron_rl.precision.threads import all_threads, single_threaded

MIN_ROWS = 16
MAX_ROWS = 32  # most rows of a BF16 product with sums of at least `SPLIT_SUM` numbers
SPLIT_SUM = 481
MIN_COLUMNS = 16
"""Fewest columns of an invariant FP32 product. With up to 8, MKL sums in another order, and with one also by the number of rows. A layer's
rows over tensor-parallel ranks, such as the gates of few heads, may be fewer on each rank than on one."""
LONG_SUM, MIN_LONG_COLUMNS = 769, 192
"""On a Xeon with AVX512-FP16 and without AMX, MKL cuts sums of at least `LONG_SUM` numbers at other places if a product has 128 columns or
fewer. From `MIN_LONG_COLUMNS` on, the cuts are the same."""
MIN_AMX_COLUMNS = 32
"""Fewest columns of an invariant FP32 product of BF16 numbers on a CPU with AMX; with up to 16, bits depend on the number of rows. Measured
for sums of 128 to 4,096 numbers, 16 to 600 rows, and one or two threads."""
VECTOR_STEP = 32  # of torch's loop; the rest of a tensor is computed by another formula
KEYS_PER_PRODUCT = 32  # keys that are summed in one product. Padding with zeros to a multiple of it changes no bit.
_MIN_SHARED_COLUMNS = 64  # fewest columns per thread of a shared product; a single column has other bits
_QUERIES_PER_STEP = 64
_SHARED_PRODUCT = 1 << 20  # size of a weight from which threads share an FP32 product of few rows; below, reading it costs too little
_SHARED_WORK = 1 << 26  # multiplications from which threads share any product; below, starting threads costs more than it saves
MAX_SCORES = 1 << 24  # most attention scores in memory at a time
_backend: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


@functools.cache
def has_amx() -> bool:
    """Return whether this machine's CPU has matrix units for BF16."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


@contextmanager
def bf16_operands(columns: int) -> Iterator[None]:
    """Context manager in which the operands of FP32 products must be BF16 numbers. `columns` is the number of columns of the results.

    A CPU with AMX then multiplies them 2 to 5 times faster with its matrix units, in all threads; sums and results stay FP32. It does
    nothing on other CPUs. The setting applies to the whole process, so no other thread may multiply meanwhile.
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
    """Return function(x) for a function from `[T, K]` to `[T, N]` and x `[..., K]`. On a CPU, the function gets at least `MIN_ROWS` rows
    and runs in one thread, or in all threads within `bf16_operands`."""
    rows = x.reshape(-1, x.shape[-1])
    if x.is_cuda:
        return function(rows).unflatten(0, x.shape[:-1])
    with nullcontext() if _backend.fp32_precision == "bf16" else single_threaded():
        return function(append_zeros(rows, -2, MIN_ROWS - len(rows)))[: len(rows)].unflatten(0, x.shape[:-1])


def run_products_in_parts(products: Callable[[slice], object], length: int) -> None:
    """Call `products` with the slices of `threads.run_in_parts`, or once within `bf16_operands`, whose products run in all threads."""
    if _backend.fp32_precision == "bf16":
        products(slice(length))
    else:
        threads.run_in_parts(products, length, 1)


def apply_product(product: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Call `apply_with_min_rows` for a `product` of rows `[T, K]` with a matrix, in tiles if BF16 requires them."""
    if x.is_cuda or x.dtype != torch.bfloat16 or x.shape[-1] < SPLIT_SUM:
        return apply_with_min_rows(product, x)
    return apply_with_min_rows(lambda rows: torch.cat([apply_with_min_rows(product, tile) for tile in rows.split(MAX_ROWS)]), x)


def invariant_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x . W^T `[..., N]`; x `[..., K]` and weight `[N, K]` have the same dtype. On a GPU, see `kernels.plain`."""
    if plain.takes(x, weight):
        return plain.multiply(x, weight)
    columns = _min_columns(weight.shape[-1], MIN_COLUMNS) if x.dtype == torch.float32 else MIN_COLUMNS
    if len(weight) >= columns or x.is_cuda:
        return apply_product(lambda rows: _multiply(rows, weight), x)
    padded = append_zeros(weight, -2, columns - len(weight))
    return apply_product(lambda rows: _multiply(rows, padded), x)[..., : len(weight)].contiguous()


def _min_columns(summands: int, columns: int) -> int:
    """Return the fewest columns of an FP32 product whose bits do not depend on their number, at least `columns`."""
    return max(columns, MIN_LONG_COLUMNS) if summands >= LONG_SUM else columns


def _multiply(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows . W^T. Threads share the columns of a large FP32 product, with the bits of one thread."""
    if weight.numel() >= _SHARED_PRODUCT or len(rows) * weight.numel() >= _SHARED_WORK:
        return multiply_in_parts(rows, weight.t())
    return rows @ weight.t()


def multiply_in_parts(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left . right `[..., N]` of `[..., K]` and `[K, N]`. On a CPU, threads share the columns of an FP32 product without gradient,
    with the bits of one thread."""
    differentiable = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    if left.dtype != torch.float32 or left.is_cuda or _backend.fp32_precision == "bf16" or differentiable:
        return left @ right
    result = left.new_empty(*left.shape[:-1], right.shape[1])
    left, right = left.detach(), right.detach()  # threads of the pool would record gradients
    columns = _min_columns(right.shape[0], _MIN_SHARED_COLUMNS)
    threads.run_in_parts(lambda part: torch.matmul(left, right[:, part], out=result[..., part]), right.shape[1], columns)
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
    """Return `invariant_matmul` of each head of x `[..., h, K]` with its own weight of `[h, N, K]`: `[..., h, N]`, with gradient."""
    return _HeadProducts.apply(x, weight)


class InvariantMatmuls(TorchFunctionMode):
    """Context manager in which `torch.matmul(x, weight.t())` and `F.linear(x, weight)` are `invariant_matmul(x, weight)`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.matmul:
            return invariant_matmul(args[0], args[1].t())
        if function is F.linear and args[2:] in ((), (None,)) and not kwargs:
            return invariant_matmul(args[0], args[1])
        return function(*args, **(kwargs or {}))


def apply_elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return function(x) for an elementwise function, float32 x of any shape. On a CPU, every number is computed by torch's vector loop."""
    if x.is_cuda:
        return function(x)
    with single_threaded():
        return function(append_zeros(x.reshape(-1), -1, -x.numel() % VECTOR_STEP))[: x.numel()].view(x.shape)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / (1 + exp(-x)) of float32 x of any shape."""
    return apply_elementwise(torch.sigmoid, x)


class InvariantRouting(InvariantMatmuls):
    """Context manager in which a router's logits (`torch.mm(x, weight.t())`, or `torch.addmm` with a bias) are `invariant_matmul`, and its
    sigmoids are `sigmoid`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.mm:
            return invariant_matmul(args[0], args[1].t())
        if function is torch.addmm:
            return invariant_matmul(args[1], args[2].t()) + args[0]
        if function in (torch.sigmoid, torch.Tensor.sigmoid):
            return sigmoid(args[0])
        return super().__torch_function__(function, types, args, kwargs)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight of x `[..., K]` and weight `[K]`, in FP32, rounded once to the dtype of x."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    last: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Return softmax(scale q k^T) v `[b, h, s, e]`, computed in FP32, in the dtype of query. No gradient.

    Args:
        query: `[b, h, s, d]`.
        key, value: `[b, g, t, d]` and `[b, g, t, e]`, with grouped-query heads if g < h. All keys must be finite.
        last: int64 `[b, s]`, index of the last key that each query attends to.
        sinks: `[h]`, a logit of each head beside the scores; its weight multiplies nothing.
        window: number of keys up to the last that a query attends to; 0: all.
    """
    batch, heads, queries, _ = query.shape
    groups = key.shape[1]
    key, value = (append_zeros(x.float(), -2, -x.shape[2] % KEYS_PER_PRODUCT) for x in (key, value))
    result = query.new_empty(batch, heads, queries, value.shape[-1])
    step = min(_QUERIES_PER_STEP, max(1, MAX_SCORES // (batch * heads * key.shape[2])))
    for start in range(0, queries, step):
        part = slice(start, start + step)
        beside = None if sinks is None else sinks.float().view(groups, -1, 1).expand(-1, -1, last[:, part].shape[1]).flatten(1)
        rows = query[:, :, part].float().mul(scale).reshape(batch, groups, -1, query.shape[-1])
        attended = _attend(rows, key, value, last[:, part], beside, window)
        result[:, :, part] = attended.reshape(batch, heads, -1, value.shape[-1])
    return result


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, last: torch.Tensor, sinks: torch.Tensor | None, window: int
) -> torch.Tensor:
    """Return `attention` of few queries, already scaled, with the heads of a group stacked: `[b, g, heads * s, e]` of
    `[b, g, heads * s, d]`. Keys are summed in chunks of `KEYS_PER_PRODUCT`, in order. Chunks beyond the last key of a query, and before its
    window, add zero. A chunk before all others holds the sinks `[g, heads * s]`, and has no values."""
    rows, scoring = query.shape[2], _choose_scoring()
    length = (int(last.max()) // KEYS_PER_PRODUCT + 1) * KEYS_PER_PRODUCT
    first = max(0, int(last.min()) + 1 - window) // KEYS_PER_PRODUCT * KEYS_PER_PRODUCT if window else 0
    scores = scoring.score(append_zeros(query, -2, scoring.min_rows - rows), key[:, :, first:length])
    numbers, ends = torch.arange(first, length), last[:, None, None, :, None]
    masked = (numbers > ends) | (numbers <= ends - window) if window else numbers > ends
    scores[:, :, :rows].unflatten(2, (-1, last.shape[1])).masked_fill_(masked, -torch.inf)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        beside = F.pad(sinks.unsqueeze(-1), (0, KEYS_PER_PRODUCT - 1, 0, scores.shape[2] - rows), value=-torch.inf)
        weights = torch.cat([beside.expand(len(scores), -1, -1, -1), scores], -1).softmax(-1)[..., KEYS_PER_PRODUCT:]
    chunks = zip(weights.split(KEYS_PER_PRODUCT, -1), value[:, :, first:length].split(KEYS_PER_PRODUCT, 2), strict=True)
    total, *others = (part @ values for part, values in chunks)
    for other in others:
        total += other
    return total[:, :, :rows]


@dataclass(frozen=True)
class _Scoring:
    """Method to multiply few queries: padded to `min_rows` rows and, if `keys_left`, with keys as the left matrix."""

    min_rows: int
    keys_left: bool = False

    def score(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return q k^T `[b, g, rows, t]`."""
        if not self.keys_left or query.shape[2] >= MIN_ROWS:
            return query @ key.transpose(-1, -2)
        return (key @ query.transpose(-1, -2)).transpose(-1, -2).contiguous()

    def is_invariant(self) -> bool:
        """Return whether few rows have the bits of many on this machine, for numbers that reveal another order of sums."""
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
    """Return the cheapest method that gives few queries the bits of many on this machine: keys on the left with AVX-512, which reads them
    once, or four rows with AVX2. How few rows give the bits of many depends on the machine, so it is found by trial."""
    with single_threaded():
        return next(scoring for scoring in (_Scoring(2, keys_left=True), _Scoring(4), _Scoring(MIN_ROWS)) if scoring.is_invariant())


def attention_gradients(inputs: tuple[torch.Tensor, ...], gradient: torch.Tensor, scale: float) -> tuple[torch.Tensor, ...]:
    """Return the gradients of the inputs of causal `attention`, from torch's fused attention, which does not store the scores."""
    query, key, value = inputs = tuple(x.detach().requires_grad_() for x in inputs)
    with torch.enable_grad():
        wide = append_zeros(value, -1, query.shape[-1] - value.shape[-1])  # torch fuses only equal widths of query, key and value
        result = F.scaled_dot_product_attention(query, key, wide, is_causal=True, scale=scale, enable_gqa=True)[..., : value.shape[-1]]
    return torch.autograd.grad(result, inputs, gradient)


def sink_attention_gradients(
    inputs: tuple[torch.Tensor, ...], sinks: torch.Tensor, gradient: torch.Tensor, scale: float, window: int
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value, and of the sinks in FP32, of causal `attention` in a window. One sequence and one group
    of heads at a time has its scores in memory."""
    per_group, tokens = inputs[0].shape[1] // inputs[1].shape[1], inputs[0].shape[2]
    ends = torch.arange(tokens)[:, None]
    masked = (torch.arange(tokens) > ends) | (torch.arange(tokens) <= ends - (window or tokens))
    results, of_sinks = [torch.empty_like(x) for x in inputs], torch.zeros_like(sinks, dtype=torch.float32)
    for number, group in itertools.product(range(len(gradient)), range(inputs[1].shape[1])):
        heads = slice(group * per_group, (group + 1) * per_group)
        places = [(number, heads), (number, slice(group, group + 1)), (number, slice(group, group + 1))]
        with torch.enable_grad():
            query, key, value = parts = [x[place].detach().float().requires_grad_() for x, place in zip(inputs, places, strict=True)]
            own = sinks[heads].detach().float().requires_grad_()
            scores = (query @ key.transpose(-1, -2) * scale).masked_fill(masked, -torch.inf)
            beside = own[:, None, None].expand(-1, tokens, 1)
            result = torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ value
        *found, of_own = torch.autograd.grad(result, [*parts, own], gradient[number, heads].float())
        for into, place, part in zip(results, places, found, strict=True):
            into[place] = part
        of_sinks[heads] += of_own
    return *results, of_sinks
