"""Loads problems with a tokenizer that is fast to import."""

from pathlib import Path
from typing import ClassVar

from megatron_rl.config import Config, ModelConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.data import load_problems


class ByteTokenizer:
    """One token per byte and no special tokens."""

    bos_token_id = eos_token_id = None
    added_tokens_decoder: ClassVar[dict] = {}

    def __call__(self, prompts, add_special_tokens):
        return {"input_ids": [list(prompt.encode()) for prompt in prompts]}

    def decode(self, ids, skip_special_tokens):
        return bytes(ids).decode(errors="replace")


count_bytes = ByteTokenizer()


def make_config(**data):
    return Config(model=ModelConfig(path=Path("m")), data=DataConfig.model_validate(data))


def load(**data):
    return load_problems(make_config(**data), count_bytes)
