"""Names on the Hugging Face hub: a model is `hf:OWNER/NAME[@REVISION]`. Imports without torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from megatron_rl.errors import UserError

HUB_PREFIX = "hf:"
"""Prefix of what is on the hub."""

_MODEL = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@(\S+))?", re.ASCII)


class HubModel(NamedTuple):
    """A model on the hub. `revision`: a branch, a tag or a commit; None for the default branch."""

    repository: str
    revision: str | None

    @classmethod
    def parse(cls, path: Path) -> HubModel | None:
        """Return the model that a path names, None for a local folder. Raise ValueError for a name of another shape."""
        if not str(path).startswith(HUB_PREFIX):
            return None
        match = _MODEL.fullmatch(str(path))
        if match is None:
            raise ValueError("is not of the form hf:OWNER/NAME[@REVISION], such as hf:Qwen/Qwen3-8B")
        return cls(match[1], match[2])

    @property
    def name(self) -> str:
        """NAME."""
        return self.repository.partition("/")[2]


def find_model_folder(path: Path) -> Path:
    """Return a model's folder: `path` itself, or the cache's folder of a model of the hub. Asks no network; raise UserError for a model
    that `hf.hub.pin_model` has not put there."""
    model = HubModel.parse(path)
    if model is None:
        return path
    from huggingface_hub import try_to_load_from_cache  # most runs need none of it

    file = try_to_load_from_cache(model.repository, "config.json", revision=model.revision)
    if not isinstance(file, str):
        raise UserError("model.path", str(path), "is not in this machine's cache", "set HF_HOME to a folder that all nodes share")
    return Path(file).parent
