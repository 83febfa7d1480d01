"""SGLang's operators on a CPU with the trainer's bits: every operator calls the function that the trainer's forward pass calls.
`rollout_sglang.hooks.cpu_moe` has the experts. Multi-head latent attention (MLA) uses the absorbed form for prompts and decoded tokens:
attention in the latent space, with w_kc and w_vc, which SGLang derives from kv_b_proj after loading and after every weight update."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from megatron_rl.kernels import batch_invariant
from megatron_rl.kernels.attention.reference import LengthGroup
from megatron_rl.kernels.batch_invariant import multiply_heads
from megatron_rl.kernels.linear.reference import fprop, fprop_by_tree, value_dtype
from megatron_rl.kernels.sums import ranks
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.int8 import int8_matmul
from megatron_rl.precision.quantized_weight import QuantizedWeight
from megatron_rl.precision.threads import run_in_parts
from parallel.formats import BLOCK
from rollout_sglang.hooks import seeded_sampling, tree_reduction
from rollout_sglang.hooks.dequant_cache import get_float_weight
from rollout_sglang.hooks.e4m3_cache import read_rows
from rollout_sglang.hooks.gpu_kernels import is_trainers_norm

_KEYS_PER_THREAD = 2048  # fewest keys in the share of a thread: handing over a smaller one costs as much as it saves
_KEYS_AT_ONCE = 1 << 14  # keys that are copied from the cache for requests whose prompts are computed together


def dispatch_block_fp8_linear(weight_block_size: list[int] | None = None, act_scale_ue8m0: bool = False) -> Callable[..., torch.Tensor]:
    """Replace `dispatch_w8a8_block_fp8_linear`, which ignores `act_scale_ue8m0` for 128x128 blocks unless DeepGEMM runs them. The engine
    would then quantize activations with fp32 scales although its checkpoint says pow2."""
    return functools.partial(apply_block_fp8_linear, act_scale_ue8m0=act_scale_ue8m0)


def apply_block_fp8_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    block_size: list[int],
    weight_scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    act_scale_ue8m0: bool = False,
    weight_bf16: torch.Tensor | None = None,
) -> torch.Tensor:
    """Replace `triton_w8a8_block_fp8_linear`: input `[..., K]` and weight E4M3 `[N, K]` -> `[..., N]`."""
    if block_size != [BLOCK, BLOCK] or input_scale is not None:
        raise NotImplementedError(f"block size {block_size} or an already quantized input is outside the precision contract")
    y = multiply_block_fp8(input, QuantizedWeight(weight, weight_scale), "pow2" if act_scale_ue8m0 else "fp32")
    return y if bias is None else y + bias


def multiply_block_fp8(x: torch.Tensor, weight: QuantizedWeight, scale_format: str) -> torch.Tensor:
    """Return `[..., N]` of x `[..., K]`, quantized with scales of this format, and a block-quantized weight `[N, K]`."""
    values = get_float_weight(weight.data, lambda: dequantize_weight(weight).to(value_dtype(x, scale_format)))
    if slices := tree_reduction.wanted_slices():
        return ranks.multiply_slices(x, values, slices, functools.partial(fprop, scale_format=scale_format))
    return (fprop_by_tree if tree_reduction.wants_partial_sums() else fprop)(x, values, scale_format)


def multiply_plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `[..., N]` of x `[..., K]` and an unquantized weight `[N, K]`."""
    if slices := tree_reduction.wanted_slices():
        return ranks.multiply_slices(x, weight, slices)
    return tree.multiply(x, weight) if tree_reduction.wants_partial_sums() else batch_invariant.invariant_matmul(x, weight)


def apply_int8_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Replace `W8A8Int8LinearMethod.apply`: x `[..., K]` -> `[..., N]`."""
    y = int8_matmul(x, get_float_weight(layer.weight, layer.weight.float), layer.weight_scale)
    return y if bias is None else y + bias


def keep_heads(model_config: Any, load_config: Any, tp_size: int) -> Any:
    """Replace `adjust_config_with_unaligned_cpu_tp`: if there are fewer key-value heads than ranks, ranks share them, as on a GPU."""
    return model_config


def apply_plain_linear(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Replace `UnquantizedLinearMethod.apply`. The bias is added to the rounded product, as in Megatron."""
    y = multiply_plain(x, layer.weight)
    return y if bias is None else y + bias


def compute_lm_head(original: Callable[..., torch.Tensor], self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Wrap `LogitsProcessor._compute_lm_head`."""
    with batch_invariant.InvariantMatmuls():
        return batch_invariant.apply_product(lambda rows: original(self, rows, *args, **kwargs), hidden)


def apply_rms_norm(
    original: Callable[..., Any],
    self: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    **named: Any,
) -> Any:
    """Wrap `RMSNorm.forward_native`: round the sum with the residual stream before the norm, as Megatron does."""
    if not is_trainers_norm(self, x, residual, post_residual_addition):
        return original(self, x, residual, post_residual_addition, **named)
    summed = x if residual is None else x + residual
    normed = batch_invariant.rms_norm(summed, self.weight, self.variance_epsilon)
    return normed if residual is None else (normed, summed)


def sample(original: Callable[..., Any], self: Any, output: Any, sampling: Any, return_logprob: bool, *args: Any, **named: Any) -> Any:
    """Wrap `Sampler.forward`: log-probs are the log-softmax of logits / temperature, summed by the trainer's tree. SGLang overwrites the
    logits in place, but computes log-probs from a copy if it is given one. Those of a greedy request are of the whole distribution."""
    logits, greedy = output.next_token_logits, sampling.top_ks == 1
    whole = logits[greedy]
    if sampling.need_top_p_sampling or sampling.need_top_k_sampling or sampling.need_min_p_sampling:
        seeded_sampling.truncate(logits, sampling)
    if return_logprob and named.get("logprob_logits") is None:
        named["logprob_logits"] = logits.clone()
        named["logprob_logits"][greedy] = whole
        if sampling.is_all_greedy:  # SGLang divides only other batches by the temperatures
            named["logprob_logits"] /= sampling.temperatures
    with _TreeLogSoftmax():
        tokens = original(self, output, sampling, return_logprob, *args, **named)
    if (mask := output.sampling_mask_output) is not None:  # SGLang computes these from probabilities too
        rows = sampling.sampling_mask_batch_indices
        mask.selected_logprobs = output.next_token_logprobs[rows].masked_fill(greedy[rows], 0.0)
    return tokens


class _TreeLogSoftmax(TorchFunctionMode):
    """Context manager in which `F.log_softmax` of logits is `tree.log_softmax`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return tree.log_softmax(args[0]) if function is F.log_softmax else function(*args, **(kwargs or {}))


def run_extend_attention(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window_size: int | None = None,
    **_: bool,
) -> torch.Tensor:
    """Compute the attention of prompts. query `[tokens, heads, d]` holds the requests one after the other. The first `extend_prefix_lens`
    of a request's `seq_lens` tokens are cached. Requests of similar lengths are computed in one batch, with the bits that each has alone.
    See `run_decode_attention` for the other arguments."""
    beside = _get_sinks_and_window(self, encoder_lens, sliding_window_size)
    cached, new = extend_prefix_lens.long(), extend_seq_lens.long()
    starts = new.cumsum(0) - new
    for own in map(torch.tensor, _batch_requests(seq_lens.tolist(), new.tolist())):
        offsets, longest = torch.arange(int(new[own].max())), int(seq_lens[own].max())
        valid = offsets < new[own, None]
        offsets = offsets * valid  # padding repeats the first token
        batch = LengthGroup(starts[own, None] + offsets, valid)
        slots = req_to_token[req_pool_indices[own], :longest].masked_fill(torch.arange(longest) >= seq_lens[own, None], 0)
        last = cached[own, None] + offsets
        batch.scatter(_attention(batch.gather(query), k_cache, v_cache, slots, last, scaling, *beside), output)
    return output


def _batch_requests(lengths: list[int], new: list[int]) -> Iterator[list[int]]:
    """Return the numbers of requests in batches that waste little on padding. A batch reads at most `_KEYS_AT_ONCE` keys, or has one
    request."""
    batches: dict[tuple[int, int], list[int]] = {}
    for number, (length, tokens) in enumerate(zip(lengths, new, strict=True)):
        padded = -(-length // batch_invariant.KEYS_PER_PRODUCT), -(-tokens // batch_invariant.MIN_ROWS)
        batches.setdefault(padded, []).append(number)
    for (chunks, _), numbers in batches.items():
        size = max(_KEYS_AT_ONCE // (chunks * batch_invariant.KEYS_PER_PRODUCT), 1)
        yield from (numbers[first : first + size] for first in range(0, len(numbers), size))


def run_decode_attention(
    self: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window_size: int | None = None,
    **_: bool,
) -> torch.Tensor:
    """Compute the attention of one decoded token per request, with all requests in one padded batch. query: `[requests, heads, d]`;
    caches: `[slots, kv heads, d]`; row r of `req_to_token` lists the slots of request r's tokens."""
    beside = _get_sinks_and_window(self, encoder_lens, sliding_window_size)
    longest = int(seq_lens.max())
    visible = torch.arange(longest, device=query.device)[None, :] < seq_lens[:, None]
    slots = req_to_token[req_pool_indices, :longest].masked_fill(~visible, 0)
    last = seq_lens[:, None].long() - 1
    output.copy_(_attention(query.unsqueeze(2), k_cache, v_cache, slots, last, scaling, *beside).squeeze(2))
    return output


def _get_sinks_and_window(backend: Any, encoder_lens: torch.Tensor | None, sliding_window_size: int | None) -> tuple[Any, int]:
    """Return the sinks `[heads]` that `hooks.gpt_oss.take_sinks` has put down, and the number of keys of a window, 0 without one. SGLang's
    size leaves out the token itself."""
    if encoder_lens is not None:
        raise NotImplementedError("cross attention is not supported on the CPU tier")
    window = 0 if sliding_window_size is None or sliding_window_size < 0 else sliding_window_size + 1
    return getattr(backend, "sinks", None), window


def _attention(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    last: torch.Tensor,
    scale: float | None,
    sinks: torch.Tensor | None,
    window: int,
) -> torch.Tensor:
    """Return `batch_invariant.attention` `[b, h, s, e]` of query `[b, h, s, d]` over the cache's `slots` `[b, t]`. Slot 0, which holds
    no token, pads the last product of keys. Padding the keys and values themselves would copy them. Threads share the requests."""
    heads = k_cache.shape[1]
    slots = F.pad(slots, (0, -slots.shape[1] % batch_invariant.KEYS_PER_PRODUCT))
    rows = (slots.long() * heads)[:, None, :] + torch.arange(heads)[:, None]  # in the cache seen as [slots * heads, d]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    results: dict[int, torch.Tensor] = {}

    def attend(own: slice) -> None:
        keys, values = (read_rows(cache, rows[own].flatten(), v_cache.shape[-1]).view(*rows[own].shape, -1) for cache in (k_cache, v_cache))
        results[own.start or 0] = batch_invariant.attention(query[own], keys, values, last[own], scale, sinks, window)

    run_in_parts(attend, len(query), max(_KEYS_PER_THREAD // slots.shape[1], 1))
    return torch.cat([results[start] for start in sorted(results)])


def get_handler(original: Callable[..., Any], registry: Any, backend: str) -> Callable[[Any, Any], Any]:
    """Wrap `AttentionBackendRegistry.get_handler`: PyTorch's attention uses the absorbed form for prompts too. It reads keys and values
    from the cache, which holds latents. SGLang would treat it like Triton's attention, which takes them as arguments."""
    if backend != "torch_native":
        return original(registry, backend)
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    return lambda attention, batch: AttnForwardMethod.MLA


def get_rotary_embedding(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap `get_rope_wrapper`: use the ordinary embedding without "rope_scaling". SGLang's CPU branch supports only YaRN."""
    if kwargs.get("rope_scaling") is not None:
        return original(*args, **kwargs)
    return original(*args, **{**kwargs, "device": None})


def dequantize_kv_b(data: torch.Tensor, scale: torch.Tensor, block_size: list[int]) -> tuple[torch.Tensor, float]:
    """Replace `block_quant_to_tensor_quant`, which makes w_kc and w_vc: return the dequantized blocks in the model's dtype and a scale
    of one. SGLang's CPU branch would requantize kv_b_proj with a single scale. Its GPU branch dequantizes too."""
    if block_size != [BLOCK, BLOCK]:
        raise NotImplementedError(f"block size {block_size} is outside the precision contract")
    return dequantize_weight(QuantizedWeight(data, scale)).to(torch.get_default_dtype()), 1.0


class _InvariantHeadProducts(TorchFunctionMode):
    """Context manager in which `torch.bmm` of `[h, T, K]` and `[h, K, N]` is `multiply_heads`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.bmm:
            return function(*args, **(kwargs or {}))
        product = multiply_heads(args[0].transpose(0, 1), args[1].transpose(1, 2)).transpose(0, 1)
        return kwargs["out"].copy_(product) if kwargs else product


def multiply_invariantly(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wrap `forward_absorb_prepare` and `forward_absorb_core`: multiply by w_kc and w_vc with the trainer's operator."""
    with _InvariantHeadProducts():
        return original(*args, **kwargs)
