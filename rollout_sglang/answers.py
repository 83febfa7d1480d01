"""Answers of an engine in columns. The engine's server packs what SGLang writes as JSON, about 40 bytes a token, into arrays of 8 bytes a
token, which the client reads without touching a token.

A client that accepts `MEDIA_TYPE` gets one MessagePack list of `Answer`, checked against their types when it is read. All other clients
get SGLang's JSON."""

import base64
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from megatron_rl.batch.kept_tokens import holds_tokens, make_kept_tokens
from megatron_rl.errors import MismatchError, RunError
from megatron_rl.hf.routing_record import RoutingShape
from megatron_rl.types import Generation, KeptTokens, RemoteColumns
from rollout_sglang.texts import TextReader

ABORTED = "abort"  # finish of a completion that the engine has dropped: its tokens are those until then
MEDIA_TYPE = "application/vnd.megatron-rl.answers"
_NOT_FINITE = "the engine computed a log-probability that is not a finite number: its weights or its FP8 scales are broken"
IDS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
_NO_IDS, _NO_LOGPROBS = np.empty(0, IDS), np.empty(0, LOGPROBS)


class Answer(msgspec.Struct, forbid_unknown_fields=True):
    """One completion as the engine sampled it. Arrays are little-endian bytes, in memory of their own that may be written."""

    finish: str  # SGLang's type of the finish reason: "stop", "length", or `ABORTED`
    version: str  # policy version of the last token
    spans: list[tuple[str, int, int]]  # policy version, first token, and end of each part of the completion, if SGLang reports them
    cached_tokens: int
    ids: bytearray  # int32 [T]
    logprobs: bytearray  # float32 [T]; NaN or infinite if SGLang computed no number
    kept_counts: bytearray | None = None  # int32 [T], see `megatron_rl.types.KeptTokens`
    kept_ids: bytearray | None = None  # int32 [sum of `kept_counts`]
    kept_logprobs: bytearray | None = None  # float32 [T]: normalized over the kept tokens
    experts: bytearray | None = None  # [prompt and output tokens but the last, layers, k], of `experts_dtype`
    experts_dtype: Literal["|u1", "<u2", "<i4"] = "<i4"  # the narrowest that holds all of them
    text: str | None = None  # if the client asked for it (`rollout_sglang.texts`) and the engine does not keep it
    remains: "Remains | None" = None  # instead of all columns
    prompt: bytearray | None = None  # int32 [prompt tokens], if the engine has kept the columns


class Remains(msgspec.Struct, forbid_unknown_fields=True):
    """What an answer says of columns that it does not hold (`rollout_sglang.remote_columns`), as in `megatron_rl.types.RemoteColumns`."""

    handle: str
    tokens: int
    digest: str
    logprob_sum: float


_ANSWERS = msgspec.msgpack.Decoder(list[Answer | None])


def pack_answers(
    answers: Sequence[dict[str, Any]],
    read_text: TextReader | None = None,
    leave: Callable[[int, Answer], Answer] = lambda number, answer: answer,
) -> bytes:
    """Return SGLang's answers to a request of several prompts in columns, with texts if `read_text` is given. `leave` takes columns out of
    the answer to the prompt of this number."""
    packed = [_pack(answer["meta_info"]) for answer in answers]
    if read_text is not None:
        for number, answer in enumerate(packed):
            answer.text = read_text(number, np.frombuffer(answer.ids, IDS))
    return msgspec.msgpack.encode([leave(number, answer) for number, answer in enumerate(packed)])


def read_answers(content: bytes) -> list[Any]:
    """Return the list of `Answer` in packed content, with None for what is missing. Raise ValueError for other data."""
    return _ANSWERS.decode(content)


def _pack(meta: dict[str, Any]) -> Answer:
    finish = meta["finish_reason"]["type"]
    if finish == ABORTED:  # SGLang may have no more fields
        return Answer(finish, "", [], 0, _to_bytes([entry[1] for entry in meta.get("output_token_logprobs") or ()], IDS), bytearray())
    entries, masks = meta["output_token_logprobs"], meta.get("output_token_sampling_mask")
    kept = None if masks is None else make_kept_tokens(masks)
    experts, dtype = _narrow(meta.get("routed_experts"))
    return Answer(
        finish,
        meta["weight_version"],
        [(span["version"], span["start"], span["end"]) for span in meta.get("weight_versions") or ()],
        meta["cached_tokens"],
        _to_bytes([entry[1] for entry in entries], IDS),
        _to_bytes([entry[0] for entry in entries], LOGPROBS),
        None if kept is None else _to_bytes(kept.counts, IDS),
        None if kept is None else _to_bytes(kept.ids, IDS),
        None if kept is None else _to_bytes(meta["output_token_sampling_logprobs"], LOGPROBS),
        experts,
        dtype,
    )


def _to_bytes(values: Any, dtype: np.dtype) -> bytearray:
    return bytearray(np.asarray(values, dtype))


def _narrow(text: str | None) -> tuple[bytearray | None, Literal["|u1", "<u2", "<i4"]]:
    """Return SGLang's routing, int32 in base64, in the narrowest dtype that holds it. Negative numbers stay, for the client to refuse."""
    if text is None:
        return None, "<i4"
    values = np.frombuffer(base64.b64decode(text), "<i4")
    most = int(values.max(initial=0)) if values.min(initial=0) >= 0 else -1
    if 0 <= most < 1 << 8:
        return bytearray(values.astype("|u1")), "|u1"
    return (bytearray(values.astype("<u2")), "<u2") if 0 <= most < 1 << 16 else (bytearray(values), "<i4")


def parse_generation(answer: Answer, mixed_versions: bool, finite: bool = True) -> Generation:
    """Return the completion in an answer. Raise RunError for unexpected policy versions, and MismatchError for a log-prob that is not
    finite unless `finite` is False."""
    versions = _find_versions(answer, mixed_versions)
    ids_T, logprobs_T = np.frombuffer(answer.ids, IDS), _read_logprobs(answer.logprobs, finite)
    if len(ids_T) != len(logprobs_T):
        raise RunError(f"the engine reports {len(logprobs_T)} log-probs for a completion of {len(ids_T)} tokens")
    versions_T = None
    if len(versions) > 1:
        lengths = [end - start for _, start, end in answer.spans]
        if sum(lengths) != len(ids_T):
            raise RunError(f"the engine reports the policy versions of {sum(lengths)} tokens for a completion of {len(ids_T)} tokens")
        versions_T = np.repeat(np.array([int(version) for version, _, _ in answer.spans], np.int32), lengths)
    return Generation(
        ids_T, logprobs_T, answer.finish, int(answer.version), versions_T, cached_tokens=answer.cached_tokens, text=answer.text
    )


def _find_versions(answer: Answer, mixed_versions: bool) -> set[str]:
    versions = {version for version, _, _ in answer.spans} | {answer.version}
    if len(versions) > 1 and not mixed_versions:
        raise RunError(f"one completion was sampled by policy versions {', '.join(sorted(versions))}")
    return versions


def read_generation(
    answer: Answer, prompt_tokens: int, routing: RoutingShape | None, records_kept: bool, mixed_versions: bool, url: str = "", key: str = ""
) -> Generation:
    """Return the completion in an answer, with its routing and kept tokens if they are recorded. `url` and `key`: of the engine, which may
    have kept the columns. Raise RunError if anything is wrong."""
    if (left := answer.remains) is not None:
        if not math.isfinite(left.logprob_sum):
            raise MismatchError(_NOT_FINITE)
        versions = tuple(sorted(map(int, _find_versions(answer, mixed_versions))))
        facts = left.handle, left.tokens, left.digest, left.logprob_sum, versions, None, prompt_tokens, answer.text is None
        about = answer.finish, int(answer.version), None, None, None, answer.cached_tokens
        return Generation(_NO_IDS, _NO_LOGPROBS, *about, RemoteColumns(url, key, *facts), answer.text or "")
    generation = parse_generation(answer, mixed_versions)
    if answer.prompt is not None:
        generation.prompt_ids_T = np.frombuffer(answer.prompt, IDS)
    if routing is not None:
        generation.routed_experts_T = read_routed_experts(answer, routing, prompt_tokens + len(generation.output_ids_T))
    if records_kept:
        read_kept_tokens(answer, generation)
    return generation


def read_kept_tokens(answer: Answer, generation: Generation) -> None:
    """Set the tokens that SGLang kept for each sampled token, and the log-probs over them. Raise RunError if one was not kept."""
    tokens = generation.output_ids_T
    kept = KeptTokens(*(np.frombuffer(data or b"", IDS) for data in (answer.kept_counts, answer.kept_ids)))
    if len(kept.counts) != len(tokens) or not holds_tokens(kept, tokens):
        raise RunError("the engine does not report which tokens top_p, top_k and min_p kept, or it drew a token that they did not keep")
    generation.kept_tokens, generation.logprobs_T = kept, _read_logprobs(answer.kept_logprobs or bytearray())


def _read_logprobs(data: bytearray, finite: bool = True) -> np.ndarray:
    logprobs_T = np.frombuffer(data, LOGPROBS)
    if finite and not np.isfinite(logprobs_T).all():
        raise MismatchError(_NOT_FINITE)
    return logprobs_T


def read_routed_experts(answer: Answer, shape: RoutingShape, tokens: int) -> np.ndarray:
    """Return the routing record (`megatron_rl.hf.routing_record`) of an answer with `tokens` tokens, including the prompt. A cached prefix
    has the routing of the request that computed it. Raise RunError if the size or an expert's number is wrong."""
    if answer.experts is None:
        raise RunError("the engine answered without the requested routing (--enable-return-routed-experts)")
    values = np.frombuffer(answer.experts, answer.experts_dtype)
    rows = tokens - 1
    if values.size != rows * shape.num_layers * shape.top_k:
        expected = f"{rows} rows of {shape.num_layers} layers and {shape.top_k} experts"
        raise RunError(f"the engine's routing of {tokens} tokens has {values.size} numbers, not {expected}")
    if values.size and not 0 <= values.min() <= values.max() < shape.num_experts:  # check before the cast to a narrow dtype
        raise RunError(f"the engine's routing names experts {values.min()} to {values.max()} of {shape.num_experts}")
    return values.reshape(rows, shape.num_layers, shape.top_k).astype(shape.dtype)
