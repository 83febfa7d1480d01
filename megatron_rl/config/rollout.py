"""The `[rollout]` section: engines and sampling."""

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from megatron_rl.config.base import MAX_COUNT, MAX_RANKS, MAX_SECONDS, MAX_TOKENS, ConfigSection
from megatron_rl.config.change import EVALUATION, FREELY, NAMED, Change
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
"""Maximum number of candidate tokens that an engine reports per sampled token (SGLang's --sampling-mask-max-tokens)."""
TopP = Annotated[float, Field(gt=0, le=1)]
TopK = Annotated[int, AfterValidator(_check_top_k)]
MinP = Annotated[float, Field(ge=0, lt=1)]


_BATCHING = "On a CPU, no bit depends on it. On a GPU, other batches round differently, so other tokens are sampled."
_RANKS = Change(
    FREELY,
    f'{_BATCHING} So do sums with `precision.reduction = "fast"`. With `"ranks"`, another max(`train.layout.tp`, `rollout.tp`) continues '
    "with other last bits, also on a CPU.",
)
_LOST = Change(FREELY, "Only decides when an engine counts as lost.")
_BATCH = Change(NAMED, "Changes the size of a batch. Problems are drawn from the same position on.")
_DISTRIBUTION = Change(NAMED, f"Changes the distribution that is sampled and trained. {EVALUATION}")


class RolloutConfig(ConfigSection):
    """The inference engines and how they sample."""

    on_resume = Change(FREELY, _BATCHING)

    engine: Annotated[str, Change(NAMED, "Another engine samples.")] = "sglang"
    """Name of the engine's entry point in the group `megatron_rl.rollout`."""
    engines: int = Field(1, ge=1, le=MAX_RANKS)
    """Number of engines, each on its own `tp` devices. A request goes to the engine with the lowest load."""
    tp: Annotated[int, _RANKS] = Field(1, ge=1, le=MAX_RANKS)
    """Tensor-parallel size of each engine."""
    ep: Annotated[int, _RANKS] = Field(1, ge=1, le=MAX_RANKS)
    """Expert-parallel size of each engine for mixture-of-experts models. Must divide `tp`."""
    nodes_per_engine: int = Field(1, ge=1, le=MAX_RANKS)
    """Number of nodes that each engine's ranks are evenly spread over. Must divide `tp` and the number of `hosts`. See
    docs/guides/slurm.md."""
    prompts_per_step: Annotated[int, _BATCH] = Field(32, ge=1, le=MAX_COUNT)
    """Number of prompts per RL step."""
    over_sampling_prompts: Annotated[int, _BATCH] = Field(0, ge=0, le=MAX_COUNT)
    """Additional prompts to sample per step. Once `prompts_per_step` groups are complete, the slowest groups are aborted. The next step
    samples them again and does not abort them again, so no problem is skipped."""
    group_size: Annotated[int, _BATCH] = Field(8, ge=1, le=MAX_COUNT)
    """Number of completions per prompt. 1 is only possible if the advantage does not compare completions, as with `gae`."""
    temperature: Annotated[float, _DISTRIBUTION] = Field(1.0, gt=0)
    """Sampling temperature, which divides the logits."""
    top_p: Annotated[TopP, _DISTRIBUTION] = 1.0
    """Sample from the smallest set of most probable tokens with at least this total probability. 1 samples from all tokens."""
    top_k: Annotated[TopK, _DISTRIBUTION] = -1
    """Sample from this many most probable tokens; -1 samples from all. Training with `top_p` or `min_p` requires it, because the engine
    reports the candidate tokens to the trainer."""
    min_p: Annotated[MinP, _DISTRIBUTION] = 0.0
    """Sample from tokens whose probability is at least this fraction of the highest probability."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple), _DISTRIBUTION] = Field((), max_length=32)
    """One or more strings that end a response, like the end token. The tokens of the string stay in the response and are trained on."""
    max_new_tokens: Annotated[
        int,
        Change(NAMED, 'Limits responses, also in evaluations. `algorithm.overlong_share` and `aggregate = "constant"` are relative to it.'),
    ] = Field(512, ge=1, le=MAX_TOKENS)
    """Maximum number of tokens in one response."""
    max_running_requests: int = Field(256, ge=1, le=MAX_COUNT)
    """Maximum number of sequences that an engine decodes at the same time."""
    max_total_tokens: int = Field(65536, ge=256, le=1 << 32)
    """Capacity of an engine's KV cache in tokens."""
    enable_prefix_caching: bool = True
    """Whether to keep the KV cache of prompts and responses for later requests with the same prefix, until the next sync."""
    chunked_prefill_size: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """Maximum number of prompt tokens that an engine computes in one batch. Longer prompts are split. Defaults to SGLang's choice."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Additional SGLang server arguments by name, such as `mem_fraction_static = 0.8`. Arguments that would break exactness or conflict
    with other fields are refused."""
    hosts: tuple[Host, ...] = Field(("127.0.0.1",), min_length=1)
    """Nodes with engines, which are evenly spread over them. Each entry is the address of the network interface that the node's engines
    listen on, either loopback or in a private network. See docs/guides/slurm.md and docs/guides/security.md."""
    start_timeout: Annotated[float, _LOST] = Field(300.0, gt=0, le=MAX_SECONDS)
    """Seconds that an engine may take to start."""
    request_timeout: Annotated[float, _LOST] = Field(600.0, gt=0, le=MAX_SECONDS)
    """Seconds that one generation or sync request may take."""
    health_timeout: Annotated[float, _LOST] = Field(60.0, gt=0, le=MAX_SECONDS)
    """Seconds that a busy engine may leave a health check unanswered. After that it is considered hung and terminated."""
    max_restarts: Annotated[int, _LOST] = Field(3, ge=0, le=MAX_COUNT)
    """Maximum number of engine restarts between two policy versions. With 0, the first engine failure ends the run."""

    @property
    def engines_per_node(self) -> int:
        """Number of engines with ranks on a node."""
        return self.engines * self.nodes_per_engine // len(self.hosts)

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of an engine on each of its nodes."""
        return self.tp // self.nodes_per_engine

    @property
    def state_slots(self) -> int:
        """Number of recurrent states in an engine's pool, for models that have them: for each running request its own and, with a prefix
        cache, two of cached prefixes, as SGLang requires. `sglang.max_mamba_cache_size` overrides it."""
        given = self.sglang.get("max_mamba_cache_size")
        return given if isinstance(given, int) else self.max_running_requests * (3 if self.enable_prefix_caching else 1)

    def to_sampling(self) -> SamplingParams:
        """Return the sampling options of completions for training."""
        names = ("temperature", "max_new_tokens", "stop", "top_p", "top_k", "min_p")
        return SamplingParams(**{name: getattr(self, name) for name in names}, record_kept_tokens=self.top_k != -1)

    def to_layout(self) -> EngineLayout:
        return EngineLayout(self.tp, self.ep, self.engines, self.nodes_per_engine)
