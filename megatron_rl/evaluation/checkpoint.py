"""Prepares the checkpoint that the engine loads: a run's or a Hugging Face checkpoint, in the engine's precision.

A folder that the engine can load is used as it is, or with the config.json that its family resolves. Anything else is first converted
into a temporary folder by the code of `export`, so the FP8 blocks are the ones that the run's sync sent. LoRA adapters are served beside
their base model, not merged, as in training.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.hub import HUB_PREFIX, find_model_folder
from megatron_rl.config.lora import LoraConfig
from megatron_rl.errors import UserError
from megatron_rl.hf.checkpoint_format import find_checkpoint_format, stores_mxfp4
from megatron_rl.hf.files import read_config, read_end_tokens
from megatron_rl.hf.hub import fetch_model, pin_hub_model
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.hf.write import write_all_but_weights
from megatron_rl.mcore.checkpoint.export import convert, read_settings, write_for_engine
from megatron_rl.mcore.checkpoint.run_weights import read_state
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.preflight import EVAL_MODEL, Facts, Needs, check
from megatron_rl.sync.plan import SyncPlan
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from parallel.sglang_shards import build_engine_shards


@dataclass(frozen=True)
class EvalCheckpoint:
    """A checkpoint whose file headers have been checked. `step` is the RL step of a run's checkpoint, or None for a Hugging Face folder."""

    folder: Path
    hf_config: dict[str, Any]
    plan: SyncPlan
    step: int | None
    loads_directly: bool
    """Whether the engine can load the weights of the folder, or of `base`, without conversion."""
    lora: LoraConfig | None = None
    """LoRA settings of a checkpoint that contains only adapters; they override the config."""
    base: Path | None = None
    """Folder of the base model of the adapters."""

    @property
    def tokenizer(self) -> Path:
        """Folder that contains the tokenizer."""
        return self.folder if self.step is None else self.folder / "hf"

    @property
    def run_dir(self) -> Path | None:
        """Folder of the run that wrote the checkpoint, or None if the checkpoint is not inside a run's folder."""
        if self.step is None:
            return None
        checkpoints, run, *_ = self.folder.resolve().parents
        return run if checkpoints.name == "checkpoints" and os.path.isfile(run / "run.json") else None

    def prepare(self, config: Config, temporary: Path) -> Path:
        """Return the folder for the engine: the checkpoint's own folder, or `temporary` with a converted copy."""
        weights = self.base or self.folder
        if self.loads_directly:
            resolved = ModelGeometry.describe_to_engine(hf_config := read_config(weights))
            unread = HFCheckpoint(weights, hf_config).list_unread_files()  # SGLang would read them
            if self.lora is None and not unread and resolved == hf_config:
                return weights
            temporary.mkdir()
            for file in set(weights.iterdir()) - {*unread, weights / "config.json"}:
                (temporary / file.name).symlink_to(file.absolute())
            write_all_but_weights(temporary, resolved, None)
        else:
            convert(weights, temporary, config.precision.model_dump(include={"mode", "high", "scale_format"}))
            write_all_but_weights(temporary, ModelGeometry.describe_to_engine(read_config(temporary)), None)  # of the decoder alone
        if self.lora is not None:
            write_for_engine(self.folder, self.lora, temporary)
        return temporary


def check_checkpoint(path: Path, option: str, config: Config) -> EvalCheckpoint:
    """Check a checkpoint without loading its weights.

    Raises UserError, naming `option`, if the checkpoint is missing or damaged, does not fit the config's lengths or engine layout, or has
    quantized weights that the config's precision would quantize again.
    """
    try:
        return _check(path, option, config)
    except UserError as error:
        if error.field not in ("--checkpoint", "model.path"):
            raise
        raise UserError(option, error.value, error.rule, error.fix) from None


def _check(path: Path, option: str, config: Config) -> EvalCheckpoint:
    path = pin_hub_model(path, option)
    folder = find_model_folder(path)
    if not os.path.isdir(folder):
        fix = "give a folder like RUN_DIR/checkpoints/step_00030, a Hugging Face checkpoint, or hf:OWNER/NAME"
        raise UserError(option, str(folder), "is not a folder" if os.path.exists(folder) else "does not exist", fix)
    contract, lora, base = PrecisionContract.from_config(config.precision), None, None
    if os.path.isfile(folder / "config.json"):
        step, hf_config = None, read_config(folder)
        loads_directly = _loads_directly(folder, option, hf_config, contract)
    else:
        state, saved = read_state(folder, of_adapters=True)
        step, hf_config, loads_directly = int(state.get("step", 0)), read_config(folder / "hf"), False
        if "lora" in state:
            lora, base = read_settings(state), _find_base(Path(state["base"]), option, hf_config)
            loads_directly = _loads_directly(base, option, read_config(base), contract)
        trained = PrecisionContract.from_config(saved)
        blocks, wanted = trained.trainer_format, contract.engine_format
        if blocks.quantized and blocks.name == wanted.name and blocks != wanted:
            rule = f"the checkpoint's blocks have {trained.scale_format} scales, and blocks are never quantized twice"
            fix = f'set it to "{trained.scale_format}"'
            raise UserError("precision.scale_format", contract.scale_format, rule, fix)
    read_end_tokens(folder if step is None else folder / "hf", hf_config, option)
    config = config.model_copy(update={"lora": lora})
    facts = Facts.here(config, hf_config=hf_config, path=base or path, option=option, trainer=Layout())
    check(facts, EVAL_MODEL if step is not None and lora is None else EVAL_MODEL | Needs.WEIGHTS, about=Needs.MODEL)
    if contract.scales_kv_by_layer:
        rule = "needs scales that only a trainer has"
        raise UserError("precision.kv", contract.kv, rule, "use --precision.kv=high, or e4m3 on a CPU")
    model = lora.adapt(facts.model) if lora else facts.model
    plan = SyncPlan((), (), build_engine_shards(model, *facts.engine[:3]), facts.contract)  # only the engine's shards: there is no trainer
    return EvalCheckpoint(folder, hf_config, plan, step, loads_directly, lora, base)


def _find_base(path: Path, option: str, hf_config: dict[str, Any]) -> Path:
    """Return the folder of the adapters' base model. Its architecture must not have changed since training."""
    if not str(path).startswith(HUB_PREFIX) and not os.path.isdir(path):
        raise UserError(option, str(path), "is the base model of these adapters, but not a folder", "restore the run's model.path")
    base = fetch_model(path, option)
    if ModelGeometry.from_hf_config(read_config(base)) != ModelGeometry.from_hf_config(hf_config):
        rule = "is the base model of these adapters, but has another architecture than during training"
        raise UserError(option, str(path), rule, "restore the model that the adapters were trained on")
    return base


def _loads_directly(folder: Path, option: str, hf_config: dict[str, Any], contract: PrecisionContract) -> bool:
    """Return whether the engine can load this Hugging Face folder without conversion. Raise UserError if it cannot be converted either."""
    stored, wanted = find_checkpoint_format(hf_config), contract.engine_format
    if stored is None:
        return not wanted.quantized and not stores_mxfp4(hf_config)
    if not wanted.quantized:
        return False
    if stored.name != wanted.name:
        name = stored.name.upper()
        rule = f"is {name}, but the config's engine is {wanted.engine_quantization}, and quantized weights are never quantized twice"
        fix = f"choose a precision.mode whose engine is {name}, or evaluate the original checkpoint"
        raise UserError(option, str(folder), rule, fix)
    if stored != wanted:
        rule = f"{folder} is {stored.name.upper()} with {stored.scale_format} scales"
        raise UserError("precision.scale_format", contract.scale_format, rule, f'set it to "{stored.scale_format}"')
    return True
