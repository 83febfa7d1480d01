"""Names of models on the Hugging Face hub: `hf:OWNER/NAME[@REVISION]`."""

import re
from pathlib import Path
from typing import NamedTuple, Self

from megatron_rl.errors import UserError

HUB_PREFIX = "hf:"
"""Prefix of names of models and data sets on the hub."""

SPLIT_COLON = re.compile(r":(?![^\[]*\])")
"""A colon between the parts of a data set's name, not within a slice such as `train[:1000]`."""

_MODEL = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@(\S+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubModel(NamedTuple):
    """A model on the hub. `revision` is a branch, tag or commit, or None for the default branch."""

    repository: str
    revision: str | None

    @classmethod
    def parse(cls, path: Path) -> Self | None:
        """Return the hub model that `path` names, or None if it is a local folder. Raise ValueError if the name is malformed."""
        if not str(path).startswith(HUB_PREFIX):
            return None
        match = _MODEL.fullmatch(str(path))
        if match is None:
            raise ValueError("is not of the form hf:OWNER/NAME[@REVISION], such as hf:Qwen/Qwen3-8B")
        return cls(match[1], match[2])

    @property
    def is_pinned(self) -> bool:
        """Whether the revision is a commit, as `hf.hub.pin_hub_model` returns it."""
        return bool(_COMMIT.fullmatch(self.revision or ""))

    @property
    def name(self) -> str:
        """The NAME part."""
        return self.repository.partition("/")[2]


def find_model_folder(path: Path) -> Path:
    """Return the local folder of a model: `path` itself, or the folder of a hub model in the cache. Does not access the network. Raise
    UserError if `hf.hub.pin_hub_model` has not downloaded the hub model."""
    model = HubModel.parse(path)
    if model is None:
        return path
    from huggingface_hub import try_to_load_from_cache  # not needed by most runs

    file = try_to_load_from_cache(model.repository, "config.json", revision=model.revision)
    if not isinstance(file, str):
        raise UserError("model.path", str(path), "is not in this machine's cache", "set HF_HOME to a folder that all nodes share")
    return Path(file).parent
