"""Exports a run's adapters from its checkpoint, in PEFT's format or for our own engine.

PEFT has one adapter per tensor of the checkpoint. In training, all tensors of a Megatron layer (such as q, k and v) share their A, so the
export writes A once for each tensor.
"""

import json
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.lora import LoraConfig
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import atomic_folder, write_file
from megatron_rl.mcore.checkpoint.folder import find_damage
from megatron_rl.mcore.checkpoint.run_weights import RunWeights, read_state
from parallel.adapters import ENGINE_FILE, is_adapter
from parallel.model_geometry import ModelGeometry
from parallel.shards import take_all

_PREFIX, _WEIGHTS = "base_model.model.", "adapter_model.safetensors"


def holds_adapters(folder: Path) -> bool:
    """Return whether a checkpoint holds adapters only."""
    return (folder / "state.json").is_file() and "lora" in read_state(folder, of_adapters=True)[0]


def read_settings(state: dict[str, Any]) -> LoraConfig:
    """Return the adapter settings in a checkpoint's state.json."""
    return LoraConfig.model_validate_json(json.dumps(state["lora"]))


def _read_geometry(folder: Path, lora: LoraConfig) -> ModelGeometry:
    with as_user_error():
        return lora.adapt(ModelGeometry.from_hf_config(read_config(folder / "hf")))


def write_for_engine(folder: Path, lora: LoraConfig, model: Path) -> None:
    """Write the adapters of a run's checkpoint into the folder `model`, which an engine loads as their base."""
    geometry = _read_geometry(folder, lora)
    weights = RunWeights(folder, geometry)
    tensors = (tensor for name, tensor in geometry.tensors().items() if is_adapter(name.removesuffix(".weight")))
    (model / ENGINE_FILE).parent.mkdir()
    write_file(model / ENGINE_FILE, {tensor.name: weights.read_values(take_all(tensor)).clone() for tensor in tensors})


def export_adapters(folder: Path, output: Path) -> None:
    """Write a run's adapters in PEFT's format into the new folder `output`. Raise UserError if the checkpoint is damaged."""
    if reason := find_damage(folder):
        raise UserError("--checkpoint", str(folder), f"is damaged: {reason}", "give another checkpoint of the run")
    state, _ = read_state(folder, of_adapters=True)
    lora = read_settings(state)
    geometry = _read_geometry(folder, lora)
    tensors = _read_adapters(geometry, RunWeights(folder, geometry))
    with atomic_folder(output) as temporary:
        write_file(temporary / _WEIGHTS, tensors)
        (temporary / "adapter_config.json").write_text(json.dumps(_describe(lora, state["base"], list(tensors)), indent=2) + "\n")


def _read_adapters(geometry: ModelGeometry, weights: RunWeights) -> dict[str, torch.Tensor]:
    """Return the tensors by PEFT's names."""
    tensors: dict[str, torch.Tensor] = {}
    for layer in geometry.list_weights():
        by_name = {weight.megatron: weight for weight in layer}
        for name, up in by_name.items():
            if name.endswith(".lora_B"):
                a = weights.read_values(by_name[name.removesuffix("B") + "A"].pieces[0])
                for tensor in {piece.tensor for piece in up.pieces}:
                    peft = _PREFIX + tensor.name
                    tensors[peft.replace(".lora_B.", ".lora_A.")] = a.clone()
                    tensors[peft] = weights.read_values(take_all(tensor)).clone()
    return tensors


def _describe(lora: LoraConfig, base: str, names: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in names}),
        "inference_mode": True,
    }
