"""The section `[rollout]`: engines and sampling. Imports without torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.hosts import Host
from megatron_rl.types import SamplingParams
from parallel.layout import EngineLayout


def _check_top_k(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("must be 1 or more, or -1 for all tokens")
    return value


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


MOST_KEPT = 4096
"""Tokens that an engine tells of a sampled token, at most: SGLang's --sampling-mask-max-tokens."""
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, AfterValidator(_check_top_k)]
MinP = Annotated[float, Field(ge=0, lt=1)]


class RolloutConfig(ConfigSection):
    """The rollout engine and how it samples."""

    engine: str = "sglang"
    """Name of the engine's entry point in the group `megatron_rl.rollout`."""
    engines: int = Field(1, ge=1)
    """Engines, each on `tp` devices of its own; a request goes to the one with the least to do."""
    tp: int = Field(1, ge=1)
    """Tensor parallel ranks of each engine."""
    ep: int = Field(1, ge=1)
    """Ranks among them that share the experts of a mixture-of-experts model; divides `tp`."""
    nodes_per_engine: int = Field(1, ge=1)
    """Nodes that the ranks of each engine lie over, as many on each; divides `tp` and the number of `hosts`. See docs/guides/slurm.md."""
    prompts_per_step: int = Field(32, ge=1)
    over_sampling_prompts: int = Field(0, ge=0)
    """Prompts sampled beyond `prompts_per_step`: once enough groups have ended, the slowest are aborted. The next step samples them again,
    and does not abort them again, so no problem is left out."""
    group_size: int = Field(8, ge=1)
    """Completions per prompt; 1 for advantages that compare none (`gae`)."""
    temperature: float = Field(1.0, gt=0)
    top_p: TopP = 1.0
    """Draw from the fewest most probable tokens that hold this share of the probability; 1: from all."""
    top_k: TopK = -1
    """Draw from this many most probable tokens; -1: from all. Training with `top_p` or `min_p` needs it: the trainer is told the tokens."""
    min_p: MinP = 0.0
    """Draw from tokens that are at least this share as probable as the most probable one."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple)] = Field((), max_length=32)
    """A text, or several, that end an answer, as its end token does. The tokens that spell them stay in the answer, and are trained."""
    max_new_tokens: int = Field(512, ge=1)
    max_running_requests: int = Field(256, ge=1)
    """Sequences that an engine decodes at once."""
    max_total_tokens: int = Field(65536, ge=256)
    """Tokens that an engine's KV cache holds."""
    enable_prefix_caching: bool = True
    """Keep keys and values of prompts and answers for later requests that begin with the same tokens, until the next sync."""
    chunked_prefill_size: int | None = Field(None, ge=1)
    """Prompt tokens that an engine computes in one batch, at most; a longer prompt takes several. None: as SGLang chooses."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """More of SGLang's own server arguments, by name: `mem_fraction_static = 0.8`. Those that would break a promise are refused."""
    hosts: tuple[Host, ...] = Field(("127.0.0.1",), min_length=1)
    """The nodes that engines run on, as many on each: for each the address of the one interface that its engines listen on, this machine's
    own or one of a private network. See docs/guides/slurm.md and docs/guides/security.md."""
    start_timeout: float = Field(300.0, gt=0)
    """Seconds an engine may take to become healthy."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds one generate call or one sync call may take."""
    health_timeout: float = Field(60.0, gt=0)
    """Seconds an engine at work may leave a question unanswered; it then counts as hung and is ended."""
    max_restarts: int = Field(3, ge=0)
    """How often, between one policy version and the next, engines that were lost are started anew; 0: the first loss ends the run."""

    @property
    def engines_per_node(self) -> int:
        """Engines that have ranks on a node."""
        return self.engines * self.nodes_per_engine // len(self.hosts)

    @property
    def ranks_per_node(self) -> int:
        """Ranks that an engine has on each of its nodes."""
        return self.tp // self.nodes_per_engine

    def to_sampling(self) -> SamplingParams:
        """Return how completions to train on are sampled."""
        names = ("temperature", "max_new_tokens", "stop", "top_p", "top_k", "min_p")
        return SamplingParams(**{name: getattr(self, name) for name in names}, record_kept_tokens=self.top_k != -1)

    def to_layout(self) -> EngineLayout:
        return EngineLayout(self.tp, self.ep, self.engines, self.nodes_per_engine)
