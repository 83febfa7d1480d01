"""The configuration: TOML in, validated pydantic models out. Imports without torch.

Every field carries its documentation below it. Unknown keys are errors that suggest the nearest name. A bad value raises
`UserError` with one line: the field, the value, the rule and the fix.
"""

from __future__ import annotations

import json
import re
import tomllib
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from megatron_rl.config.algorithm import Algorithm
from megatron_rl.config.data import Data
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.config.errors import as_user_error, section_of
from megatron_rl.config.placement import Placement
from megatron_rl.config.reward import RewardConfig
from megatron_rl.config.base import Section as _Section
from megatron_rl.config.sync import Sync
from megatron_rl.errors import UserError
from megatron_rl.config.hosts import Host


class Architecture(_Section):
    """Widths of a model made from scratch (Qwen3 architecture, or Qwen3-MoE). Multiples of 128 keep every FP8 block whole."""

    vocab_size: int = Field(384, ge=259)
    """Rows of the embedding; the project's byte-level tokenizer needs 259."""
    hidden_size: int = Field(256, ge=128, multiple_of=128)
    intermediate_size: int = Field(512, ge=128, multiple_of=128)
    num_hidden_layers: int = Field(2, ge=1)
    num_attention_heads: int = Field(2, ge=1)
    num_key_value_heads: int = Field(2, ge=1)
    head_dim: int = Field(128, ge=32, multiple_of=16)
    num_experts: int = Field(0, ge=0)
    """Experts in every layer, in place of its MLP (Qwen3-MoE); 0: a dense model, which has no use for the next two."""
    num_experts_per_tok: int = Field(2, ge=2)
    """Experts that each token is sent to."""
    moe_intermediate_size: int = Field(256, ge=128, multiple_of=128)
    """Width of one expert."""
    max_position_embeddings: int = Field(1024, ge=16)
    rope_theta: float = Field(10000.0, gt=0)
    tie_word_embeddings: bool = False
    initializer_range: float = Field(0.02, gt=0)

    @model_validator(mode="after")
    def _fits_together(self) -> Architecture:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if 0 < self.num_experts < self.num_experts_per_tok:
            raise ValueError(f"num_experts ({self.num_experts}) must be at least num_experts_per_tok ({self.num_experts_per_tok})")
        return self


class WarmStart(_Section):
    """Supervised training on the task's worked examples, with the same trainer, before RL starts. 0 steps: random weights."""

    steps: int = Field(0, ge=0)
    batch_size: int = Field(64, ge=1)
    """Examples per optimizer step."""
    learning_rate: float = Field(1e-3, gt=0)
    step_by_step_share: float = Field(0.5, ge=0, le=1)
    """Share of the examples that show the intermediate results; the others state the answer at once."""
    tool_share: float = Field(0.0, ge=0, le=1)
    """Share of all examples that call the calculator instead; needs environment.name = "calculator"."""
    seed: int = 0


class Model(_Section):
    """The policy to train."""

    path: Path
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer)."""
    create: Architecture | None = None
    """Make the checkpoint at `path` with these widths when it is not there yet. Absent: `path` must exist."""
    warm_start: WarmStart = WarmStart()
    """How a created model learns the task's format first."""


class Precision(_Section):
    """The precision flow of trainer and engine. See docs/precision.md."""

    mode: Literal["bf16", "fp8_rollout", "int8_rollout", "fp8_unified"] = "fp8_unified"
    """`fp8_unified`: trainer and engine compute with the same FP8 blocks (Jet-RL). `fp8_rollout`, `int8_rollout` (FlashRL): the trainer
    computes in `high`, the engine with weights quantised at each sync. `bf16`: both in `high`."""
    scale_format: Literal["pow2", "fp32"] = "pow2"
    """Format of block scales. `pow2` is exact on both sides."""
    backend: Literal["emulated", "transformer_engine", "deep_gemm"] = "emulated"
    """Who computes the trainer's FP8 products. `emulated` runs on any device and is the reference."""
    high: Literal["bf16", "fp32"] = "bf16"
    """The dtype of everything that is not FP8, the same on both sides. `fp32` is the faster one on a CPU."""


class TrainLayout(_Section):
    """How the trainer's ranks share model and tokens. tp * cp * pp * dp is the number of ranks."""

    tp: int = Field(1, ge=1)
    """Tensor parallel ranks."""
    sequence_parallel: bool = True
    """Tensor parallel ranks share the tokens, too, where each token is computed by itself (norms, residuals)."""
    pp: int = Field(1, ge=1)
    """Pipeline stages."""
    vpp: int = Field(1, ge=1)
    """Parts of every pipeline stage, which take turns (the interleaved schedule): a smaller bubble, more messages."""
    cp: int = Field(1, ge=1)
    """Context parallel ranks, which share the tokens of every sequence; tp * cp divides the attention heads."""
    ep: int = Field(1, ge=1)
    """Ranks that share the experts of a mixture-of-experts model; ep * etp divides tp * dp."""
    etp: int | None = Field(None, ge=1)
    """Tensor parallel ranks within an expert; as many as `tp` where it is not given."""
    dp: int = Field(1, ge=1)
    """Data parallel replicas."""


class Train(_Section):
    """The optimizer and how a batch is cut."""

    layout: TrainLayout = TrainLayout()
    distributed_optimizer: bool = True
    """The dp * cp ranks that hold the same weights share Adam's state (and the FP32 masters of BF16 weights)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward pass computes anew instead of keeping them: those within MLPs and experts (`selective`), or all within
    a layer (`full`)."""
    learning_rate: float = Field(1e-6, gt=0)
    """Peak learning rate of Adam, reached after `warmup_steps`, then constant."""
    warmup_steps: int = Field(0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    adam_eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    clip_grad: float = Field(1.0, ge=0)
    """Largest gradient norm; 0 turns clipping off."""
    router_aux_loss: float = Field(0.0, ge=0)
    """Weight of Megatron's load-balancing loss of experts, per token and layer; 0 turns it off. See docs/moe.md."""
    router_bias_rate: float = Field(0.0, ge=0)
    """What an optimizer step adds to or takes from a router's correction bias (DeepSeek-V3), which balances load without a loss."""
    micro_batch_tokens: int = Field(8192, ge=1)
    """Tokens per forward pass of one rank, most: sequences are laid end to end up to it. A longer sequence has a pass of its own. Context
    parallel ranks lay up to cp times as many."""
    steps: int = Field(30, ge=1)
    """RL steps (policy versions) of the run."""
    seed: int = 0


class Rollout(_Section):
    """The rollout engine and how it samples."""

    engine: str = "sglang"
    """Name of the engine's entry point in the group `megatron_rl.rollout`."""
    engines: int = Field(1, ge=1)
    """Engines, each on `tp` devices of its own; a request goes to the one with the least to do."""
    tp: int = Field(1, ge=1)
    """Tensor parallel ranks of each engine."""
    ep: int = Field(1, ge=1)
    """Ranks among them that share the experts of a mixture-of-experts model; divides `tp`."""
    prompts_per_step: int = Field(32, ge=1)
    group_size: int = Field(8, ge=2)
    """Completions per prompt."""
    temperature: float = Field(1.0, gt=0)
    max_new_tokens: int = Field(512, ge=1)
    max_running_requests: int = Field(256, ge=1)
    """Sequences that an engine decodes at once."""
    max_total_tokens: int = Field(65536, ge=256)
    """Tokens that an engine's KV cache holds."""
    hosts: tuple[Host, ...] = Field(("127.0.0.1",), min_length=1)
    """The nodes that engines run on, as many on each: for each the address of the one interface that its engines listen on, this machine's
    own or one of a private network. See docs/slurm.md and docs/security.md."""
    start_timeout: float = Field(300.0, gt=0)
    """Seconds an engine may take to become healthy."""
    request_timeout: float = Field(600.0, gt=0)
    """Seconds one generate call or one sync call may take."""
    health_timeout: float = Field(60.0, gt=0)
    """Seconds an engine at work may leave a question unanswered; it then counts as hung and is ended."""
    max_restarts: int = Field(3, ge=0)
    """How often, between one policy version and the next, engines that were lost are started anew; 0: the first loss ends the run."""

    @model_validator(mode="after")
    def _fits_together(self) -> Rollout:
        if self.engines % len(self.hosts):
            nodes = len(self.hosts)
            raise ValueError(
                f"engines ({self.engines}) must be a multiple of the nodes that hosts names ({nodes}), for each runs as many; "
                f"set engines to {-(-self.engines // nodes) * nodes}, or name fewer hosts"
            )
        return self

    @property
    def engines_per_node(self) -> int:
        return self.engines // len(self.hosts)


class Checkpoint(_Section):
    """What a run leaves behind."""

    every: int = Field(0, ge=0)
    """RL steps between checkpoints; 0: one at the end only."""
    keep: int = Field(3, ge=0)
    """The newest checkpoints that stay; 0: all."""
    resume: str = "never"
    """`never`: a new run. `auto`: the newest run under log.dir goes on in its folder unless it is finished; where there is none, a new one.
    Else the folder of the run that goes on, finished or not. See docs/checkpoints.md."""


class Log(_Section):
    """Where a run writes."""

    dir: Path = Path("runs/default")
    """Parent folder; every run makes a folder of its own in it."""
    samples: int = Field(8, ge=0)
    """Completions kept per step for the report."""
    attribute_every: int = Field(0, ge=0)
    """RL steps between attributions of the mismatch to its causes, at three forward passes each (docs/precision.md); 0: never."""
    stuck_after: float = Field(1800.0, ge=0)
    """Seconds without any rank entering another phase after which a run says where each rank stands and ends; 0: never (docs/slurm.md)."""


class Config(_Section):
    """A whole run."""

    model: Model
    precision: Precision = Precision()
    train: Train = Train()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    data: Data = Data()
    reward: RewardConfig = RewardConfig()
    environment: EnvironmentConfig | None = None
    placement: Placement = Placement()
    sync: Sync = Sync()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, apply `--section.key=value` overrides, validate. Relative paths in it are relative to the working directory.

    Raises UserError: file missing or unreadable, TOML syntax (file and line), unknown key, wrong type or value.
    """
    table = apply_overrides(_read_toml(path), overrides)
    try:  # JSON, as in it a string may become a Path and a list a tuple although the models are strict
        return Config.model_validate_json(json.dumps(table, default=str))
    except ValidationError as error:
        raise as_user_error(error, Config) from None


def apply_overrides(table: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `table` with `--section.key=value` or `--section.key value` set; the value is TOML, or else a plain string.

    Example: ``apply_overrides({}, ["--train.steps=3", "--log.dir", "a"])`` gives ``{"train": {"steps": 3}, "log": {"dir": "a"}}``.
    """
    result = json.loads(json.dumps(table, default=str))
    for path, text in _pairs(overrides):
        *sections, key = path.split(".")
        target = result
        for depth, section in enumerate(sections, 1):
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                raise UserError(f"--{path}", text, f"{'.'.join(sections[:depth])} is a value, not a section")
        target[key] = _override_value(path, text)
    return result


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = str(error)
        at = re.search(r" \(at line (\d+), column (\d+)\)$", message)
        line = int(at[1]) if at else text.count("\n") + 1  # "at end of document" carries no number
        raise UserError(f"{path}, line {line}", None, f"not valid TOML: {message[: at.start()] if at else message}") from None
    except UnicodeDecodeError:
        raise UserError("CONFIG", str(path), "is not a UTF-8 text file", "give a TOML file such as configs/quickstart.toml") from None
    except OSError as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise UserError("CONFIG", str(path), reason, "give a TOML file such as configs/quickstart.toml") from None


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    rest = iter(overrides)
    for word in rest:
        path, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not all(path.split(".")):
            raise UserError("override", word, "is not of the form --section.key=value")
        if not equals:
            value = next(rest, "--")
            if value.startswith("--"):
                raise UserError(f"--{path}", None, "has no value", f"write --{path}=VALUE")
        yield path, value


def _override_value(path: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    if len(parsed) > 1 or (not isinstance(parsed["value"], str) and _is_text(path)):
        return text  # the folder --log.dir=2026 is text although it reads as a number
    return parsed["value"]


def _is_text(path: str) -> bool:
    parent, _, name = path.rpartition(".")
    section = section_of(parent, Config)
    info = section.model_fields.get(name) if section else None
    return info is not None and bool({str, Path} & {info.annotation, *typing.get_args(info.annotation)})
