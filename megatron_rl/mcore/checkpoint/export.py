"""Converts a run's checkpoint or a Hugging Face checkpoint to a Hugging Face checkpoint in another precision.

The result is BF16 or FP32, or the same quantized bytes that the engine would receive; optionally with wider matrices (`hf.align`). Files
of at most `FILE_BYTES` are read and written one at a time, so a process holds one file and one parameter. Ranks under torchrun share the
files; their content does not depend on the number of ranks.

Adapters of a run are written in PEFT's format, or for our own engine. PEFT has one adapter per tensor of the checkpoint. In training, all
tensors of a Megatron layer (such as q, k and v) share their A, so the export writes A once for each tensor.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_rl.config import PrecisionConfig
from megatron_rl.config.hub import HubModel
from megatron_rl.config.launch import read_launch
from megatron_rl.config.lora import LoraConfig
from megatron_rl.config.reading import check_path, reading
from megatron_rl.distributed import errors_on_all_ranks, gather_from_ranks, get_rank_and_size, run_on_rank0, write_on_rank0
from megatron_rl.distributed.launch_store import join_ranks
from megatron_rl.errors import UserError, as_run_error, as_user_error
from megatron_rl.hf.align import Alignment, align_config, is_scaled, widen
from megatron_rl.hf.checkpoint_format import find_high_format
from megatron_rl.hf.files import read_config
from megatron_rl.hf.hub import fetch_model
from megatron_rl.hf.mtp_layers import MTP_FOLDER, MTPLayers
from megatron_rl.hf.read import HFCheckpoint
from megatron_rl.hf.stacks import join_parts
from megatron_rl.hf.write import (
    FILE_BYTES,
    atomic_folder,
    cut_into_files,
    describe_weights,
    name_file,
    write_all_but_weights,
    write_file,
    write_index,
)
from megatron_rl.mcore.checkpoint.folder import check_room, find_damage
from megatron_rl.mcore.checkpoint.run_weights import RunWeights, read_state
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import store
from parallel.adapters import ENGINE_FILE, is_adapter
from parallel.formats import MODES
from parallel.model_geometry import ModelGeometry
from parallel.mtp_layers import list_mtp_copies
from parallel.shards import HFTensor, Region, take_all
from parallel.transport.process_group import register_shared_gloo
from parallel.wrappers import DECODER, rewrap

_STACKING = ("gpt_oss", "qwen3_5_moe_text")
"""Families whose checkpoints stack the experts of a layer. PEFT has no place for adapters of single ones."""


class _Source(NamedTuple):
    """The checkpoint to export, and the precision of the result."""

    description: Path  # folder with config.json and tokenizer
    hf_config: dict[str, Any]
    model: ModelGeometry  # with MTP layers if the run trained them
    read_values: Callable[[Region], torch.Tensor]
    contract: PrecisionContract  # precision of the result
    mtp_layers: MTPLayers | None  # untrained MTP layers, which are copied
    keeps_fp32_norms: bool  # keep FP32 norms of a BF16 checkpoint, which were scaled for wider matrices


def export_checkpoint(checkpoint: Path, output: Path, precision: str, alignment: Alignment | None = None) -> None:
    """Run the command `export` on every rank; see `convert`. `precision` is "bf16", "fp8" or "int8". Adapters are written in PEFT's format.
    Raises UserError also if `output` exists, or if blocks made by a run would be widened."""
    modes = {mode.engine.name: {"mode": name} for name, mode in MODES.items() if mode.engine} | {"bf16": {"mode": "bf16", "high": "bf16"}}
    if precision not in modes:
        raise UserError("--precision", precision, f"must be one of {', '.join(sorted(modes))}", "choose one")
    precision_fields: dict[str, Any] = modes[precision]
    with _launched_ranks():
        checkpoint = run_on_rank0(lambda: _check_paths(checkpoint, output), Path)
        if run_on_rank0(lambda: holds_adapters(checkpoint), bool):
            if alignment:
                raise UserError("--align", alignment.block, "cannot widen adapters", "omit --align")
            write_on_rank0(lambda: export_adapters(checkpoint, output))
            return
        if alignment and precision != "bf16" and not os.path.isfile(checkpoint / "config.json"):
            rule, fix = "cannot widen quantized blocks of a run", "use --precision bf16, then export the result again"
            raise UserError("--align", alignment.block, rule, fix)
        convert(checkpoint, output, precision_fields, alignment)


@contextmanager
def _launched_ranks() -> Iterator[None]:
    """Context manager that joins the ranks of this launch, if there are several, for small messages."""
    if not read_launch().is_launched or dist.is_initialized():
        yield
        return
    join_ranks(register_shared_gloo(), timedelta(minutes=30))
    try:
        yield
    finally:
        dist.destroy_process_group()


def _check_paths(checkpoint: Path, output: Path) -> Path:
    """Return the local folder of `checkpoint`, downloaded if necessary."""
    with reading("--output", str(output)):
        check_path(output)
    if os.path.lexists(output):
        raise UserError("--output", str(output), "exists already", "name a new folder")
    return fetch_model(checkpoint, "--checkpoint")


def convert(
    folder: Path, output: Path, precision_fields: dict[str, Any], alignment: Alignment | None = None, file_bytes: int = FILE_BYTES
) -> None:
    """Convert a checkpoint to a Hugging Face checkpoint in another precision and, with `alignment`, to wider matrices. Collective.
    `precision_fields` are the fields of `PrecisionConfig` that differ from the source's.

    A run's weights are quantized like in a sync. A Hugging Face checkpoint's quantized weights become BF16, or its high-precision weights
    are quantized, FP8 with the default scale format; unquantized tensors of a quantized result keep their dtype. Raise UserError if the
    checkpoint is damaged, does not fit its model, or is quantized already, and RunError on every rank if the disk is full. On an error,
    nothing is left behind."""
    rank, world = get_rank_and_size()
    is_run = not os.path.isfile(folder / "config.json")
    with errors_on_all_ranks():
        if is_run:
            _check_run(folder, rank, world)
    with errors_on_all_ranks():
        source = _open_run(folder, precision_fields) if is_run else _open_hf(folder, precision_fields, checks=rank == 0)
        with as_user_error():
            wide_config = align_config(source.hf_config, alignment) if alignment else source.hf_config
    model, contract, mtp = source.model, source.contract, source.mtp_layers
    for kind in dict.fromkeys(model.attention):
        if contract.engine_format.quantized and not kind.can_widen and (reason := kind.refuse_engine_format(contract.engine_format)):
            raise UserError("--precision", contract.engine_format.name, f"is not supported for {reason}", "use --precision bf16")
    wide = replace(ModelGeometry.from_hf_config(wide_config), trains_mtp=model.trains_mtp)
    if wide != model and wide.mtp_layers:
        model, wide, mtp = replace(model, trains_mtp=False), replace(wide, trains_mtp=False), None
        wide_config = {**wide_config, "num_nextn_predict_layers": 0}
    copies = _list_copies(wide)
    stored_tensors = wide.tensors() | {name: wide.tensors()[original] for name, original in copies.items()}
    sizes = {name: contract.format_of(tensor.role).count_bytes((tensor.rows, tensor.cols)) for name, tensor in stored_tensors.items()}
    if rank == 0 and (limit := _find_limit(stored_tensors.values(), contract)):
        print(limit, flush=True)
    mtp_sizes = mtp.count_bytes(contract) if mtp else {}
    sizes |= mtp_sizes
    files = cut_into_files(sizes, file_bytes)
    own = range(len(files) * rank // world, len(files) * (rank + 1) // world)
    asked = (copies.get(name, name) for number in own for name in files[number] if name not in mtp_sizes)
    tensors = widen(source.read_values, model, wide, asked)

    def make(number: int) -> dict[str, torch.Tensor]:
        stored: dict[str, torch.Tensor] = {}
        for name in files[number]:
            if mtp and name in mtp_sizes:
                stored |= mtp.read(name, contract)
            else:
                tensor, value = next(tensors)
                stored |= _store(replace(tensor, name=name), value, source, is_scaled(model.tensors()[tensor.name], wide))
        return join_parts(stored)

    with ExitStack() as stack:
        temporary = write_on_rank0(lambda: stack.enter_context(atomic_folder(output)), Path)
        write_on_rank0(lambda: check_room(temporary, sum(sizes.values())))
        written = []
        for turn in range(-(-len(files) // world)):  # one file per rank at a time, so that all ranks stop soon after an error
            with errors_on_all_ranks(), as_run_error():
                for number in own[turn : turn + 1]:
                    written.append(write_file(temporary / name_file(number, len(files)), make(number)))
        by_file = [sizes for part in gather_from_ranks(written, list[dict[str, int]]) for sizes in part]

        def complete() -> None:
            write_index(temporary, by_file)
            description = rewrap(describe_weights(wide_config, contract, to_engine=False), wide_config)
            write_all_but_weights(temporary, description, source.description, "--checkpoint")
            stack.close()  # publishes the folder

        write_on_rank0(complete)


def _find_limit(tensors: Iterable[HFTensor], contract: PrecisionContract) -> str | None:
    """Return what transformers cannot read of a result, or None."""
    blocks = [(tensor, block) for tensor in tensors if (block := contract.format_of(tensor.role).block)]
    if any(not block[1] for _, block in blocks):
        return "transformers 5.19 ignores the scales of INT8 weights (w8a8_int8) and computes wrong numbers, SGLang uses them"
    if any(tensor.rows % block[0] or tensor.cols % block[1] for tensor, block in blocks):
        return "edge blocks of some tensors are partial: transformers 5.19 cannot dequantize them, SGLang and vLLM can"
    return None


def _list_copies(model: ModelGeometry) -> dict[str, str]:
    """Return {name: name of the original} of the copies of embedding and output layer that checkpoints with trained MTP layers hold."""
    originals = {tensor.role: name for name, tensor in model.tensors().items()}
    numbers = range(model.mtp_layers if model.trains_mtp else 0)
    return {name: originals[copy.role] for number in numbers for name, copy in list_mtp_copies(model, number).items()}


def _open_hf(folder: Path, precision_fields: dict[str, Any], checks: bool) -> _Source:
    hf_config = read_config(folder)
    checkpoint = HFCheckpoint(folder, hf_config, "--checkpoint")
    if checkpoint.format and precision_fields["mode"] != "bf16":
        rule = f"{folder} is quantized to {checkpoint.format.name.upper()} already and cannot be quantized again"
        raise UserError("--precision", None, rule, "use --precision bf16")
    with as_user_error():
        model = ModelGeometry.from_hf_config(hf_config)
    if checks:
        checkpoint.check(model)
        checkpoint.check_scales(model.tensors().values(), None)
        for line in checkpoint.describe_unread(model):
            print(line, flush=True)
    high = find_high_format(hf_config)
    contract = PrecisionContract.from_config(PrecisionConfig.model_validate({"high": high, **precision_fields}))
    mtp = MTPLayers(checkpoint, model)
    return _Source(folder, hf_config, model, checkpoint.read_values, contract, mtp, keeps_fp32_norms=high == "bf16")


def _check_run(folder: Path, rank: int, world: int) -> None:
    """Check this rank's share of the files, reading every byte."""
    read_state(folder)
    if reason := find_damage(folder, rank, world):
        raise UserError("--checkpoint", str(folder), f"is damaged: {reason}", "give another checkpoint of the run")


def _open_run(folder: Path, precision_fields: dict[str, Any]) -> _Source:
    _, precision = read_state(folder)
    hf_config = read_config(folder / "hf")
    with as_user_error():
        model = ModelGeometry.from_hf_config(hf_config)
    weights, kept = RunWeights(folder, model), folder / MTP_FOLDER
    mtp = MTPLayers(HFCheckpoint(kept, hf_config, "--checkpoint"), model) if os.path.isdir(kept) else None
    contract = PrecisionContract.from_config(precision.model_copy(update=precision_fields))

    def read_values(region: Region) -> torch.Tensor:
        value, format = weights.read_values(region), contract.format_of(region.tensor.role)
        return value if format.quantized else value.to(getattr(torch, format.dtype))  # before widening

    return _Source(folder / "hf", hf_config, weights.model, read_values, contract, mtp, keeps_fp32_norms=False)


def _store(tensor: HFTensor, value: torch.Tensor, source: _Source, scaled: bool) -> dict[str, torch.Tensor]:
    """Return the tensors to store for one tensor: its value, or bytes and scales if it is quantized."""
    if value.dtype == torch.float32 and (scaled or (tensor.role == "norm" and source.keeps_fp32_norms)):  # or scaled by an earlier export
        return {tensor.name: value}
    return store(tensor.name, value.view(tensor.shape), source.contract.format_of(tensor.role))


def holds_adapters(folder: Path) -> bool:
    """Return whether a checkpoint holds adapters only."""
    return os.path.isfile(folder / "state.json") and "lora" in read_state(folder, of_adapters=True)[0]


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
    has_experts = any(".experts." in name for name in tensors)
    if has_experts and geometry.family in _STACKING:
        print("adapters of experts are written, but peft 0.21 has no place for them in models of this family", flush=True)
    hub = HubModel.parse(Path(state["base"]))
    description = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub.repository if hub else os.path.abspath(state["base"]),
        "revision": hub.revision if hub else None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in tensors}),
        "target_parameters": _list_other_mlps(tensors) if has_experts and geometry.family not in _STACKING else None,
        "inference_mode": True,
    }
    with atomic_folder(output) as temporary:
        write_file(temporary / "adapter_model.safetensors", tensors)
        (temporary / "adapter_config.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def _list_other_mlps(tensors: Iterable[str]) -> list[str]:
    """Return the weights of dense layers and shared experts. Beside adapted experts, PEFT finds them only by these names: it takes names of
    modules, such as gate_proj, for those of experts."""
    parts = (name.split(".lora_")[0].partition(".layers.")[2].partition(".")[2] for name in tensors)
    return sorted({f"{part}.weight" for part in parts if part.startswith("mlp.") and ".experts." not in part})


def _read_adapters(geometry: ModelGeometry, weights: RunWeights) -> dict[str, torch.Tensor]:
    """Return the tensors by PEFT's names. Those of a wrapper have two: PEFT loads them by one into the class of the whole model, as vLLM
    does, and by the other into that of its decoder, `AutoModelForCausalLM`. Each ignores what it does not know. PEFT merges the two of
    an expert's, so these have one."""
    tensors: dict[str, torch.Tensor] = {}
    for layer in geometry.list_weights():
        by_name = {weight.megatron: weight for weight in layer}
        for name, up in by_name.items():
            if name.endswith(".lora_B"):
                a = weights.read_values(by_name[name.removesuffix("B") + "A"].pieces[0])
                for tensor in {piece.tensor for piece in up.pieces}:
                    b = weights.read_values(take_all(tensor))
                    second = tensor.name if ".experts." in tensor.name else tensor.name.replace(DECODER, "model.", 1)
                    for stored in {tensor.name, second}:
                        peft = f"base_model.model.{stored}"
                        tensors |= {peft.replace(".lora_B.", ".lora_A."): a.clone(), peft: b.clone()}
    return tensors
