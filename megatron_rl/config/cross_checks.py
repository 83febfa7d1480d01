"""Rules on how settings, layout and model fit together, which `train` checks before it starts and `plan` before it suggests.

Imports without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_rl.config import Config, LayoutConfig
from megatron_rl.errors import UserError
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry


def check_trainer_layout(model: ModelGeometry, layout: Layout, settings: LayoutConfig) -> None:
    """Raise UserError where the trainer cannot build this model in this layout; how `parallel` cuts shards is checked elsewhere.
    `settings`: the configured layout, for what is not a size."""
    if model.vocab % layout.tp:  # padded rows would take part in the softmax
        raise UserError("train.layout.tp", layout.tp, f"must divide vocab_size ({model.vocab})", "use a divisor of it")
    if layout.cp > 1 and model.heads % (layout.tp * layout.cp):  # a rank computes attention for some heads of all tokens
        rule = f"tp * cp = {layout.tp} * {layout.cp} must divide num_attention_heads ({model.heads})"
        raise UserError("train.layout.cp", layout.cp, rule, "use a smaller one")
    if model.experts is not None and layout.tp > 1 and not settings.sequence_parallel:
        rule = f"is what Megatron's experts need where tp is {layout.tp}"
        raise UserError("train.layout.sequence_parallel", False, rule, "leave it out")
    if model.experts is None and layout.etp != layout.tp:  # it would be ignored silently
        raise UserError("train.layout.etp", layout.etp, f"needs a model with experts, {model.kind} has none", "leave it out")


def longest_sequence(config: Config) -> int:
    """Return the tokens of the longest prompt and the longest answer, an environment's messages included."""
    messages = config.environment.max_tokens if config.environment else 0
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens + messages


def check_lengths(config: Config, hf_config: dict[str, Any]) -> None:
    """Raise UserError where the longest sequence exceeds the model's positions."""
    longest = longest_sequence(config)
    limit = hf_config.get("max_position_embeddings", longest)
    if longest > limit:
        environment = f" and environment.max_tokens ({config.environment.max_tokens})" if config.environment else ""
        rule = f"with data.max_prompt_tokens ({config.data.max_prompt_tokens}){environment} exceeds the model's {limit} positions"
        raise UserError("rollout.max_new_tokens", config.rollout.max_new_tokens, rule, "lower one of them")


def check_placement(config: Config) -> None:
    """Raise UserError where stale tokens would be trained on as if they were new."""
    for error, _ in find_staleness_conflicts(config, config.placement.max_staleness):
        raise error


def find_staleness_conflicts(config: Config, staleness: int) -> Iterator[tuple[UserError, dict[str, object]]]:
    """Yield what conflicts with tokens that are up to `staleness` policy versions old: the error, and the settings that resolve it."""
    algorithm = config.algorithm
    if staleness and algorithm.correction == "none" and algorithm.old_policy == "trainer":
        rule = "trains on tokens of older versions, and nothing corrects for that"
        fix = 'set algorithm.correction = "tis", or old_policy = "engine"'
        yield UserError("placement.max_staleness", staleness, rule, fix), {"algorithm.correction": "tis"}
    if staleness and config.sync.running == "continue" and algorithm.routing_replay == "engine":
        rule = "replays one routing per token, and a completion that goes on over a switch has been routed by several versions"
        fix = 'set sync.running = "finish", or routing_replay = "none"'
        yield UserError("algorithm.routing_replay", "engine", rule, fix), {"sync.running": "finish"}
    if staleness and config.log.attribute_every:
        rule = "tells causes apart for tokens of the trainer's own version only"
        fix = "set it to 0, or placement.max_staleness to 0"
        yield UserError("log.attribute_every", config.log.attribute_every, rule, fix), {"log.attribute_every": 0}
