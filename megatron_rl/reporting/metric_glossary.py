"""The words and numbers of the report: what each metric means, and how its value is written."""

from __future__ import annotations

import json
import re

from megatron_rl.observability.console import MetricValue

_MEANING = {
    "policy_version": ("optimizer steps behind the policy", "count"),
    "reward/mean": ("mean reward of the sampled completions", "number"),
    "reward/std": ("standard deviation of the rewards", "number"),
    "reward/errors": ("completions that no verdict could be had for", "count"),
    "reward/overlong": ("mean length penalty, in addition to the reward", "number"),
    "reward/kl": ("KL estimate against the reference per token, taken from the reward, in nats", "small"),
    "sampling/rounds": ("rounds of sampling to fill the batch", "count"),
    "sampling/discarded": ("groups left out because their members earned the same", "count"),
    "sampling/without_signal": ("groups in the batch whose members earned the same", "count"),
    "accuracy/train": ("share of sampled completions that are correct", "share"),
    "eval/accuracy": ("share of held-out problems answered correctly", "share"),
    "mismatch/abs_mean": ("mean |log p trainer - log p engine| over the tokens of the trainer's version, in nats", "small"),
    "mismatch/abs_max": ("largest |log p trainer - log p engine| of a token, in nats", "small"),
    "mismatch/k3_kl": ("k3 estimate of KL(rollout || trainer) per token, in nats", "small"),
    "mismatch/without_replay/abs_mean": ("mean |log p trainer - log p engine|, had the trainer not replayed the routing", "small"),
    "mismatch/without_replay/abs_max": ("largest |log p trainer - log p engine|, had the trainer not replayed the routing", "small"),
    "mismatch/without_replay/k3_kl": ("k3 estimate of KL(rollout || trainer), had the trainer not replayed the routing", "small"),
    "router/load_mean": ("most tokens of an expert over the mean, mean over layers", "number"),
    "router/load_max": ("most tokens of an expert over the mean, in the most uneven layer", "number"),
    "router/entropy": ("entropy of the routers' choice per token, mean over layers, in nats", "number"),
    "router/entropy_min": ("entropy of the routers' choice per token, in the surest layer, in nats", "number"),
    "router/dropped": ("choices of an expert that no expert received", "count"),
    "router/differs": ("share of tokens that the trainer's routers would send elsewhere than the engine's, mean over layers", "share"),
    "router/differs_without_replay": ("the same, had no layer before replayed the routing", "share"),
    "loss/policy": ("policy loss", "small"),
    "loss/kl": ("KL term against the reference model", "small"),
    "clip/positive": ("share of tokens that the clip touches, advantage above 0", "share"),
    "clip/negative": ("share of tokens that the clip touches, advantage below 0", "share"),
    "clip/bound_low": ("calibrated lower bound of the ratio", "number"),
    "clip/bound_high": ("calibrated upper bound of the ratio", "number"),
    "correction/mean_positive": ("mean weight of mismatch correction, advantage above 0", "number"),
    "correction/mean_negative": ("mean weight of mismatch correction, advantage below 0", "number"),
    "correction/max_positive": ("largest weight of mismatch correction, advantage above 0", "number"),
    "correction/max_negative": ("largest weight of mismatch correction, advantage below 0", "number"),
    "correction/touched_positive": ("share of tokens capped or masked, advantage above 0", "share"),
    "correction/touched_negative": ("share of tokens capped or masked, advantage below 0", "share"),
    "entropy": ("mean entropy of the policy per token, in nats", "number"),
    "grad_norm": ("norm of the gradient before clipping", "number"),
    "learning_rate": ("learning rate", "small"),
    "length/mean": ("mean length of a completion, in sampled tokens", "number"),
    "length/max": ("longest completion, in sampled tokens", "count"),
    "length/truncated": ("share of completions cut at the length limit", "share"),
    "tokens/generated": ("tokens generated", "count"),
    "tokens/padding": ("share of the places in micro-batches that hold no token", "share"),
    "environment/turns": ("mean number of the policy's turns in a completion", "number"),
    "environment/token_share": ("share of the completions' tokens that the environment wrote", "share"),
    "environment/tool_errors": ("messages by which the environment refused what the policy asked for", "count"),
    "environment/errors": ("completions whose environment failed", "count"),
    "tokens/per_second": ("tokens generated per second of generation", "count"),
    "staleness/mean": ("mean age of a sampled token, in policy versions", "number"),
    "staleness/max": ("age of the oldest sampled token, in policy versions", "count"),
    "staleness/share": ("share of the tokens that an older version sampled", "share"),
    "staleness/mixed": ("share of completions that several versions sampled", "share"),
    "staleness/abs_mean": ("mean |log p trainer - log p engine| over the stale tokens, in nats", "small"),
    "staleness/k3_kl": ("k3 estimate of KL(rollout || trainer) per stale token, in nats", "small"),
    "sync/bytes": ("bytes moved from trainer to engine", "bytes"),
    "sync/tensors": ("tensors moved", "count"),
    "sync/blocks": ("FP8 blocks or INT8 channels moved", "count"),
    "sync/proved": ("tensors whose hashes were equal on both sides", "count"),
    "engine/restarts": ("engines that took the place of lost ones", "count"),
    "time/recovery": ("from the loss of an engine to the next proved sync", "seconds"),
    "time/step": ("the whole step", "seconds"),
}
CAUSES = ("kernels", "activations", "weights", "version")
"""Of the mismatch, from the engine to the newest weights; see `megatron_rl.training.mismatch_attribution`."""
CAUSE_LABELS = {
    "kernels": "other kernels",
    "activations": "quantised activations",
    "weights": "quantised weights",
    "version": "newer weights",
    "total": "engine to newest weights",
}
"""How the report calls each of `CAUSES`, and their total."""

_PATTERNS = (
    (re.compile(r"mismatch/cause/(\w+)/abs_mean"), "mean |Δ log p| by the cause “{}”, in nats", "small"),
    (re.compile(r"mismatch/cause/(\w+)/abs_max"), "largest |Δ log p| of a token by the cause “{}”, in nats", "small"),
    (re.compile(r"mismatch/cause/(\w+)/mean"), "mean Δ log p by the cause “{}”, of either sign, in nats", "small"),
    (re.compile(r"mismatch/cause/(\w+)/k3"), "what the cause “{}” adds to the k3 estimate of KL(rollout || trainer), in nats", "small"),
    (re.compile(r"router/load/layer_(\d+)"), "most tokens of an expert over the mean, layer {}", "number"),
    (re.compile(r"reward/part/(.+)"), "mean of the reward function {}, before its weight", "number"),
    (re.compile(r"accuracy/level_(\d+)"), "share of correct completions, level {}", "share"),
    (re.compile(r"eval/level_(\d+)"), "held-out accuracy, level {}", "share"),
    (re.compile(r"accuracy/source_(.+)"), "share of correct completions, set {}", "share"),
    (re.compile(r"eval/source_(.+)"), "held-out accuracy, set {}", "share"),
    (re.compile(r"ahead/(\w+)"), "the phase “{}” of this step's completions, while earlier steps were trained on", "seconds"),
    (re.compile(r"memory/engine_(\w+)_mb"), "memory of the engine at the end of the phase “{}”, in MiB", "count"),
    (re.compile(r"memory/device_(\w+)_mb"), "memory that all programs held on the fullest device after the phase “{}”, in MiB", "count"),
    (re.compile(r"memory/(\w+)_mb"), "memory of the largest trainer rank in the phase “{}”, in MiB", "count"),
    (re.compile(r"time/(\w+)"), "the phase “{}”", "seconds"),
)
_UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
HIDDEN_METRICS = ("step", "unix_time")
"""Keys of a row that are no measurements."""


def describe_metric(key: str) -> tuple[str, str]:
    """Return what a metric means, and its format; ("", "number") for an unknown one."""
    if key in _MEANING:
        return _MEANING[key]
    for pattern, words, form in _PATTERNS:
        if match := pattern.fullmatch(key):
            return words.format(match[1]), form
    return "", "number"


def format_value(value: MetricValue, form: str) -> str:
    """Return a value as text. `form`: share (0.5 is "50.0 %"), count, bytes, seconds, small (scientific where needed) or number."""
    if value is None:
        return "not finite"
    if form == "share":
        return f"{100 * value:.1f} %"
    if form == "count":
        return f"{value:,.0f}"
    if form == "bytes":
        return format_bytes(value)
    if form == "seconds":
        return f"{value:.2f} s" if value < 100 else format_duration(value)
    return f"{value:.2e}" if value and abs(value) < (1e-2 if form == "small" else 1e-3) else f"{value:.4g}"


def format_bytes(size: float) -> str:
    """Return bytes with a decimal unit: 3_200_000 is "3.20 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_duration(seconds: float) -> str:
    """Return seconds as "45 s", "7 min 12 s" or "3 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_toml(config: dict[str, object], prefix: str = "") -> str:
    """Return a configuration as TOML sections, for reading: what was not set is a comment; values are written as in JSON."""

    def line(key: str, value: object) -> str:
        return f"# {key} is not set" if value is None else f"{key} = {json.dumps(value, ensure_ascii=False, default=str)}"

    lines = [line(key, value) for key, value in config.items() if not isinstance(value, dict)]
    text = "\n".join(([f"[{prefix}]"] if prefix and lines else []) + lines)
    sections = [format_toml(value, f"{prefix}.{key}" if prefix else key) for key, value in config.items() if isinstance(value, dict)]
    return "\n\n".join(section for section in (text, *sections) if section)


def visible(text: str) -> str:
    """Replace control characters and unpaired surrogates by escapes such as \\x07, so that any completion can be shown."""
    return _UNSHOWABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
