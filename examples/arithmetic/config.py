"""What the demo adds to a run's configuration: the widths of the model to make, and how it learns the task's format. No torch."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_rl.config import Config
from megatron_rl.config.base import ConfigSection


class ArchitectureConfig(ConfigSection):
    """Widths of a model made from scratch (Qwen3 architecture, Qwen3-MoE or GLM-4.5). Multiples of 128 keep every FP8 block whole."""

    vocab_size: int = Field(384, ge=259)
    """Rows of the embedding; the byte-level tokenizer needs 259."""
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
    num_nextn_predict_layers: int = Field(0, ge=0)
    """Layers for multi-token prediction. A model that has any is a GLM-4.5: its first layer has an MLP, all others have experts."""
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
            raise ValueError("num_nextn_predict_layers makes a GLM-4.5, which has experts: set num_experts")
        if 0 < self.num_experts < self.num_experts_per_tok:
            raise ValueError(f"num_experts ({self.num_experts}) must be at least num_experts_per_tok ({self.num_experts_per_tok})")
        return self


class WarmStartConfig(ConfigSection):
    """Supervised training on the task's worked examples. 0 steps: random weights."""

    steps: int = Field(0, ge=0)
    batch_size: int = Field(64, ge=1)
    """Examples per optimizer step."""
    learning_rate: float = Field(1e-3, gt=0)
    step_by_step_share: float = Field(0.5, ge=0, le=1)
    """Share of the examples that show the intermediate results; the others state the answer at once."""
    tool_share: float = Field(0.0, ge=0, le=1)
    """Share of all examples that call a tool instead: the calculator, as the run's environment, or Python, by the run's agent."""
    seed: int = 0


class DemoConfig(Config):
    """A run's configuration with two more sections, which a file of their own holds."""

    architecture: ArchitectureConfig = ArchitectureConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
