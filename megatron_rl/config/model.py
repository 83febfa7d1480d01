"""The section `[model]`: the policy. Imports without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.hub import HubModel, find_model_folder


def _check_name(path: Path) -> Path:
    HubModel.parse(path)
    return path


class ModelConfig(ConfigSection):
    """The policy to train."""

    path: Annotated[Path, AfterValidator(_check_name)]
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer), or `hf:OWNER/NAME[@REVISION]` from the hub."""

    @property
    def folder(self) -> Path:
        """The checkpoint's folder; of a model of the hub, the cache's, once `preflight.pin_model` has put it there."""
        return find_model_folder(self.path)

    @property
    def name(self) -> str:
        """What to call the model in titles and names."""
        model = HubModel.parse(self.path)
        return model.name if model else self.path.name
