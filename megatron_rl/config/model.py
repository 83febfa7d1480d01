"""The `[model]` section."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from megatron_rl.config.base import ConfigSection
from megatron_rl.config.change import EQUAL, Change
from megatron_rl.config.hub import HubModel, find_model_folder


def _check_name(path: Path) -> Path:
    HubModel.parse(path)
    return path


class ModelConfig(ConfigSection):
    """The policy to train."""

    on_resume = Change(EQUAL, "Reference, LoRA base, and imported FP8 blocks are read from it. The hashes of its files are compared.")

    path: Annotated[Path, AfterValidator(_check_name)]
    """Folder of a Hugging Face checkpoint (config.json, safetensors, tokenizer), or `hf:OWNER/NAME[@REVISION]` for a model on the hub."""

    @property
    def folder(self) -> Path:
        """Local folder of the checkpoint. For a hub model this is its cache folder, after `preflight.pin_model` has downloaded it."""
        return find_model_folder(self.path)

    @property
    def name(self) -> str:
        """Display name of the model."""
        model = HubModel.parse(self.path)
        return model.name if model else self.path.name
