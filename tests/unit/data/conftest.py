"""A tokenizer with a chat template, and one that is fast to import."""

import json
from pathlib import Path

import pytest

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.config import Config, ModelConfig
from megatron_rl.config.data import DataConfig
from megatron_rl.data import check_data, load_problems
from megatron_rl.hf.tokenizer import load_tokenizer


@pytest.fixture
def model(tmp_path) -> Path:
    make_byte_tokenizer(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows: object, name: str = "rows.jsonl") -> str:
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    return write_rows


@pytest.fixture
def load_prompts(model):
    """Check and load a training set and return its distinct prompts."""

    def load(train: object, **data: object) -> list[str]:
        config = Config(model=ModelConfig(path=model), data=DataConfig.model_validate({"train": str(train), "chat": True, **data}))
        check_data(config.data, model)
        drawn = load_problems(config, load_tokenizer(model))[0].next_batch(9)
        assert not any(problem.history or problem.tools for problem in drawn)
        return sorted({problem.prompt for problem in drawn})

    return load
