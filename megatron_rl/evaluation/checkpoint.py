"""The checkpoint that the engine loads: a run's or a Hugging Face one, in the precision that the config gives the engine.

A folder that the engine can load is loaded as it is. Anything else is converted into a temporary folder first, by the code that `export`
uses: a run's FP8 blocks are those that its sync sent. Adapters are served beside their base, not merged, as in their run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.hub import HUB_PREFIX, find_model_folder
from megatron_rl.config.lora import LoraConfig
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.hub import fetch_model, pin_hub_model
from megatron_rl.hf.read import find_checkpoint_format
from megatron_rl.mcore.checkpoint.run_weights import read_state
from megatron_rl.mcore.weights.adapter_export import read_settings, write_for_engine
from megatron_rl.mcore.weights.export import convert
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.preflight import EVAL_MODEL, Facts, Needs, check
from megatron_rl.sync.plan import SyncPlan
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry
from parallel.sglang_shards import build_engine_shards


@dataclass(frozen=True)
class EvalCheckpoint:
    """A checkpoint that was checked as far as its files' headers go. `step` is a run's RL step, None for a Hugging Face folder."""

    folder: Path
    hf_config: dict[str, Any]
    plan: SyncPlan
    step: int | None
    loads_directly: bool
    """The engine loads the weights as they are: the folder's own, or those of `base`."""
    lora: LoraConfig | None = None
    """Of a checkpoint that holds adapters alone: their settings, whatever the config says."""
    base: Path | None = None
    """The folder of the model that they were trained on."""

    @property
    def tokenizer(self) -> Path:
        """The folder with its tokenizer."""
        return self.folder if self.step is None else self.folder / "hf"

    @property
    def run_dir(self) -> Path | None:
        """The folder of the run that wrote it; None if it is not in one."""
        parents = self.folder.resolve().parents
        return parents[1] if self.step is not None and parents[0].name == "checkpoints" and (parents[1] / "run.json").is_file() else None

    def prepare(self, config: Config, temporary: Path) -> Path:
        """Return the folder for the engine: the checkpoint's own, or `temporary`, made from it."""
        weights = self.base or self.folder
        if self.loads_directly and self.lora is None:
            return weights
        if self.loads_directly:
            temporary.mkdir()
            for file in weights.iterdir():
                (temporary / file.name).symlink_to(file.resolve())
        else:
            convert(weights, temporary, config.precision.model_dump(include={"mode", "high", "scale_format"}))
        if self.lora is not None:
            write_for_engine(self.folder, self.lora, temporary)
        return temporary


def check_checkpoint(path: Path, option: str, config: Config) -> EvalCheckpoint:
    """Check a checkpoint without loading it.

    Raises UserError, naming `option`, if it is missing or damaged, does not fit the config's lengths or engine layout, or has quantized
    weights that the config's precision would quantize again.
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
    if not folder.is_dir():
        fix = "give a folder like RUN_DIR/checkpoints/step_00030, a Hugging Face checkpoint, or hf:OWNER/NAME"
        raise UserError(option, str(folder), "is no folder" if folder.exists() else "does not exist", fix)
    contract, lora, base = PrecisionContract.from_config(config.precision), None, None
    if (folder / "config.json").is_file():
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
            rule = f"the checkpoint's blocks have {trained.scale_format} scales, and blocks are not quantised twice"
            fix = f'set it to "{trained.scale_format}"'
            raise UserError("precision.scale_format", contract.scale_format, rule, fix)
    config = config.model_copy(update={"lora": lora})
    facts = Facts.here(config, hf_config=hf_config, path=base or path, option=option, trainer=Layout())
    check(facts, EVAL_MODEL if step is not None and lora is None else EVAL_MODEL | Needs.WEIGHTS, about=Needs.MODEL)
    if contract.scales_kv_by_layer:
        rule = "needs the scales of a trainer, and an evaluation has none"
        raise UserError("precision.kv", contract.kv, rule, "use --precision.kv=high, or e4m3 on a CPU")
    model = lora.adapt(facts.model) if lora else facts.model
    plan = SyncPlan((), (), build_engine_shards(model, *facts.engine[:3]), facts.contract)  # no trainer: what the engine is to hold
    return EvalCheckpoint(folder, hf_config, plan, step, loads_directly, lora, base)


def _find_base(path: Path, option: str, hf_config: dict[str, Any]) -> Path:
    """Return the folder of the model that adapters were trained on, which must be of the architecture that it was."""
    if not str(path).startswith(HUB_PREFIX) and not path.is_dir():
        raise UserError(option, str(path), "is the base of these adapters, and no folder", "put it there: the run's model.path")
    base = fetch_model(path, option)
    if ModelGeometry.from_hf_config(read_config(base)) != ModelGeometry.from_hf_config(hf_config):
        rule = "is the base of these adapters, and another model than it was then"
        raise UserError(option, str(path), rule, "put the model there that they were trained on")
    return base


def _loads_directly(folder: Path, option: str, hf_config: dict[str, Any], contract: PrecisionContract) -> bool:
    """Return whether the engine loads this Hugging Face folder as it is; False if it must be converted first."""
    stored, wanted = find_checkpoint_format(hf_config), contract.engine_format
    if stored is None:
        return not wanted.quantized
    if not wanted.quantized:
        return False
    if stored.name != wanted.name:
        name = stored.name.upper()
        rule = f"is {name}, the config's engine is {wanted.engine_quantization}; quantised weights are not quantised twice"
        fix = f"choose a precision.mode whose engine is {name}, or evaluate the checkpoint that it was made from"
        raise UserError(option, str(folder), rule, fix)
    if stored != wanted:
        rule = f"{folder} is {stored.name.upper()} with {stored.scale_format} scales"
        raise UserError("precision.scale_format", contract.scale_format, rule, f'set it to "{stored.scale_format}"')
    return True
