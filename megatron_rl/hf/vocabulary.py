"""The tokens of a model as the trainer or an engine knows them. A run compares both before the first request."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_rl.errors import RunError
from megatron_rl.hf.files import read_config, read_end_tokens

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of one side."""

    end_tokens: list[int]  # sorted ids that end a completion
    tokens: int  # tokens of the tokenizer, including added ones
    digest: str  # hash of the tokenizer's {token: id}
    rows: int  # rows of the embedding


def find_end_tokens(tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Return the ids that end a completion of an engine, according to a tokenizer and the configs in its folder."""
    folder = Path(tokenizer.name_or_path)
    hf_config = read_config(folder) if os.path.isfile(folder / "config.json") else {}
    return read_end_tokens(folder, hf_config) | ({tokenizer.eos_token_id} - {None})


def make_vocabulary(tokenizer: "PreTrainedTokenizerBase", end_tokens: set[int], rows: int) -> Vocabulary:
    """Return the tokens of a tokenizer. `end_tokens` are those of the model's configs, to which the tokenizer adds its own."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    ends = end_tokens | ({tokenizer.eos_token_id} - {None})
    return Vocabulary(sorted(ends), len(tokenizer), hashlib.blake2b(vocabulary.encode(), digest_size=16).hexdigest(), rows)


def check_vocabulary(found: list[Vocabulary], tokenizer: "PreTrainedTokenizerBase", folder: Path, hf_config: Mapping[str, Any]) -> None:
    """Raise RunError if an engine rank ends completions at other tokens, or has another vocabulary, than the model in `folder`."""
    wanted = make_vocabulary(tokenizer, read_end_tokens(folder, hf_config), hf_config["vocab_size"])
    for rank, vocabulary in enumerate(found):
        for name, value in vars(wanted).items():
            if getattr(vocabulary, name) != value:
                what = f"{name.replace('_', ' ')} {getattr(vocabulary, name)} of its vocabulary, the trainer has {value}"
                raise RunError(f"engine rank {rank} reads another tokenizer or config than the trainer: it has {what}")
