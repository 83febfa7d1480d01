"""Conversion of SGLang's JSON answers to completions, with their log-probs, kept tokens and expert routing."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from megatron_rl.batch.kept_tokens import holds_tokens, make_kept_tokens
from megatron_rl.errors import RunError
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.types import Generation, SamplingParams


def make_sampling_params(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters of a request to SGLang."""
    return {
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "stop": list(sampling.stop),
        "sampling_seed": sampling.seed,
    }


def parse_generation(answer: dict[str, Any], mixed_versions: bool) -> Generation:
    """Return the completion in an answer. Raise RunError if several policy versions sampled it and `mixed_versions` is False, or if a
    log-prob is not finite."""
    meta = answer["meta_info"]
    spans = meta.get("weight_versions") or []
    versions = {span["version"] for span in spans} | {meta["weight_version"]}
    if len(versions) > 1 and not mixed_versions:
        raise RunError(f"one completion was sampled by policy versions {', '.join(sorted(versions))}")
    entries = meta["output_token_logprobs"]
    logprobs_T = np.array([entry[0] for entry in entries], np.float32)
    ids_T = np.array([entry[1] for entry in entries], np.int32)
    if np.isnan(logprobs_T).any():  # JSON has no NaN and holds None instead
        raise RunError("the engine computed a log-probability that is not a finite number: its weights or its FP8 scales are broken")
    versions_T = None
    if len(versions) > 1:
        lengths = [span["end"] - span["start"] for span in spans]
        if sum(lengths) != len(ids_T):
            raise RunError(f"the engine reports the policy versions of {sum(lengths)} tokens for a completion of {len(ids_T)} tokens")
        versions_T = np.repeat(np.array([int(span["version"]) for span in spans], np.int32), lengths)
    finish, version = str(meta["finish_reason"]["type"]), int(meta["weight_version"])
    return Generation(ids_T, logprobs_T, finish, version, versions_T, cached_tokens=int(meta["cached_tokens"]))


def read_kept_tokens(answer: dict[str, Any], generation: Generation) -> None:
    """Set the tokens that SGLang kept for each sampled token, and the log-probs over them. Raise RunError if one was not kept."""
    kept, tokens = make_kept_tokens(answer["meta_info"].get("output_token_sampling_mask") or []), generation.output_ids_T
    if len(kept.counts) != len(tokens) or not holds_tokens(kept, tokens):
        raise RunError("the engine does not report which tokens top_p, top_k and min_p kept, or it drew a token that they did not keep")
    generation.kept_tokens = kept
    generation.logprobs_T = np.array(answer["meta_info"]["output_token_sampling_logprobs"], np.float32)


def read_routed_experts(answer: dict[str, Any], shape: RoutingShape, tokens: int) -> np.ndarray:
    """Return the routing record (`megatron_rl.hf.routing_record`) of an answer with `tokens` tokens, including the prompt. SGLang keeps
    the router's choice beside every slot of its KV cache, so cached prefixes have the routing of the request that computed them. It
    writes int32 in base64, all layers of the model, row by row. Raise RunError if the size or an expert's number is wrong."""
    text = answer["meta_info"].get("routed_experts")
    if text is None:
        raise RunError("the engine answered without the requested routing (--enable-return-routed-experts)")
    values = np.frombuffer(base64.b64decode(text), dtype=np.int32)
    rows = tokens - 1
    if values.size != rows * shape.num_layers * shape.top_k:
        expected = f"{rows} rows of {shape.num_layers} layers and {shape.top_k} experts"
        raise RunError(f"the engine's routing of {tokens} tokens has {values.size} numbers, not {expected}")
    if values.size and not 0 <= values.min() <= values.max() < shape.num_experts:  # check before the cast to a narrow dtype
        raise RunError(f"the engine's routing names experts {values.min()} to {values.max()} of {shape.num_experts}")
    return values.reshape(rows, shape.num_layers, shape.top_k).astype(shape.dtype)
