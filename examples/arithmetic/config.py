"""Configuration sections of the demo: the architecture of the new model and its warm start. Does not import torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from megatron_rl.config import Config
from megatron_rl.config.base import ConfigSection


class ArchitectureConfig(ConfigSection):
    """Sizes of a new Qwen3, Qwen3-MoE, Qwen3.5, or GLM-4.5 model. Multiples of 128 keep FP8 blocks whole."""

    vocab_size: int = Field(384, ge=259)
    """Rows of the embedding. The byte-level tokenizer needs 259."""
    hidden_size: int = Field(256, ge=128, multiple_of=128)
    intermediate_size: int = Field(512, ge=128, multiple_of=128)
    num_hidden_layers: int = Field(2, ge=1)
    num_attention_heads: int = Field(2, ge=1)
    num_key_value_heads: int = Field(2, ge=1)
    head_dim: int = Field(128, ge=32, multiple_of=16)
    num_experts: int = Field(0, ge=0)
    """Number of experts that replace the MLP of every layer (Qwen3-MoE); 0 means a dense model."""
    num_experts_per_tok: int = Field(2, ge=2)
    moe_intermediate_size: int = Field(256, ge=128, multiple_of=128)
    num_nextn_predict_layers: int = Field(0, ge=0)
    """Number of multi-token prediction layers. If above 0, the model is a GLM-4.5, with an MLP in the first layer and experts elsewhere."""
    full_attention_interval: int = Field(0, ge=0)
    """If above 0, the model is a Qwen3.5: layers whose number it divides have attention, the others gated delta nets."""
    linear_num_key_heads: int = Field(2, ge=1)
    linear_num_value_heads: int = Field(4, ge=1)
    linear_key_head_dim: int = Field(64, ge=32, multiple_of=16)
    linear_value_head_dim: int = Field(64, ge=32, multiple_of=16)
    max_position_embeddings: int = Field(1024, ge=16)
    rope_theta: float = Field(10000.0, gt=0)
    tie_word_embeddings: bool = False
    initializer_range: float = Field(0.02, gt=0)

    @model_validator(mode="after")
    def _fits_together(self) -> ArchitectureConfig:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.num_nextn_predict_layers and not self.num_experts:
            raise ValueError("num_nextn_predict_layers needs a model with experts (GLM-4.5): set num_experts")
        if self.full_attention_interval and self.num_experts:
            raise ValueError("full_attention_interval is for a model without experts: set num_experts = 0")
        if 0 < self.num_experts < self.num_experts_per_tok:
            raise ValueError(f"num_experts ({self.num_experts}) must be at least num_experts_per_tok ({self.num_experts_per_tok})")
        return self


class WarmStartConfig(ConfigSection):
    """Supervised training on worked examples of the task. With 0 steps the model has random weights."""

    steps: int = Field(0, ge=0)
    batch_size: int = Field(64, ge=1)
    """Examples per optimizer step."""
    learning_rate: float = Field(1e-3, gt=0)
    step_by_step_share: float = Field(0.5, ge=0, le=1)
    """Share of the examples that show intermediate results. The others state the answer at once."""
    tool_share: float = Field(0.0, ge=0, le=1)
    """Share of the examples that call a tool: the calculator of the run's environment or agent."""
    seed: int = 0
    saved_as: Literal["fp32", "bf16"] = "fp32"
    """Data type of the written checkpoint. The shipped models are BF16, since half as many bytes are enough."""


class DemoConfig(Config):
    """A run's configuration with two more sections, which come from a second file."""

    architecture: ArchitectureConfig = ArchitectureConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
