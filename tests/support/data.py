"""Loads problems with a tokenizer that is fast to import."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config import Config, ModelConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.data import ProblemStream, load_problems
from megatron_rl.types import Problem


def count_bytes(prompts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
    return {"input_ids": [list(prompt.encode()) for prompt in prompts]}


def make_config(**data: object) -> Config:
    return Config(model=ModelConfig(path=Path("m")), data=DataConfig.model_validate(data))


def load(**data: object) -> tuple[ProblemStream, list[Problem]]:
    return load_problems(make_config(**data), count_bytes)
