"""The section `[data]`: where problems come from and how they are asked. Imports without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from megatron_rl.config_section import Section


class Data(Section):
    """Where problems come from."""

    train: str = "arithmetic"
    """`arithmetic` (made by the project) or the path of a JSONL file."""
    eval: str | None = "arithmetic"
    """Held-out problems: as `train`; an empty text for no evaluation. Never shares a prompt with `train`."""
    format: Literal["arithmetic", "gsm8k"] = "arithmetic"
    """Shape of a JSONL file's rows; ignored for generated data."""
    prompt_template: str = "{question}"
    """Text around each question; must hold `{question}`."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer problems are left out, counted and logged."""
    eval_size: int = Field(128, ge=1)
    """Held-out problems scored at each evaluation."""
    eval_every: int = Field(5, ge=1)
    """RL steps between evaluations; the first (step 0) and the last step are always evaluated."""
    levels: tuple[int, ...] = (2, 3, 4, 5)
    """Difficulty levels of generated problems: the number of operations."""
    seed: int = 0

    @field_validator("eval")
    @classmethod
    def _no_eval(cls, eval: str | None) -> str | None:
        return eval or None  # TOML has no null

    @model_validator(mode="after")
    def _template(self) -> Data:
        if "{question}" not in self.prompt_template:
            raise ValueError(f"prompt_template {self.prompt_template!r} must hold {{question}}")
        return self
