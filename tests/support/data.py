"""Loads problems with a tokenizer that is fast to import."""

from pathlib import Path

from megatron_rl.config import Config, ModelConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.data import load_problems


def count_bytes(prompts, add_special_tokens):
    return {"input_ids": [list(prompt.encode()) for prompt in prompts]}


def make_config(**data):
    return Config(model=ModelConfig(path=Path("m")), data=DataConfig.model_validate(data))


def load(**data):
    return load_problems(make_config(**data), count_bytes)
