"""Verify, byte for byte, that a weight sync between two layouts delivers a model's weights. Runs on CPUs.

    python tools/verify_sync.py --hf-config FILE_OR_DIR --train tp=4,pp=2 --rollout tp=2 [--layers N] [--seed N]
        [--scale-format pow2|fp32] [--dump DIR] [--json FILE]

Each trainer rank is a gloo process that builds its part of the real Megatron model, fills it with random weights, quantizes them as the
trainer does, and sends them with `WeightSync`. The engine ranks are tensors with the names and shapes of SGLang, filled by the engine's
receiving code. Every received byte is compared with the result of quantizing the whole Hugging Face tensor. The exit code is 0 if every
byte agrees, 1 if any byte differs, and 2 for bad input.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from harness import EngineRankStub, EngineStub, JsonFile, parse_sizes, run_on_ranks, write_json
from safetensors.torch import save_file

from megatron_rl.cli.main import run_script
from megatron_rl.config import PrecisionConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0
from megatron_rl.errors import as_user_error
from megatron_rl.hf.files import read_object
from megatron_rl.mcore.layers.linear.quantized_linear import list_quantized_layers
from megatron_rl.mcore.model import build_model, start_megatron
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors, global_parameters
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.quantizers import quantize
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from parallel.digest import make_stored_tensors, raw_bytes, view_rect
from parallel.layout import EngineLayout, Layout
from parallel.model_geometry import ModelGeometry
from parallel.reshard import get_scale_rect
from parallel.shards import HFTensor, Rect, Region, Shard
from parallel.wrappers import unwrap

_NOT_ABOUT_WEIGHTS = {"rope_theta": 10_000.0, "rope_parameters": None, "rope_scaling": None, "use_sliding_window": False}
"""Values of a config.json that affect no weight, replaced by values that the trainer supports."""
_BY_LAYER = ("layer_types", "mlp_layer_types", "indexer_types")
"""Lists of a config.json with an entry for each layer."""


@dataclass(frozen=True)
class VerifyTask:
    """The sync to verify; every process receives a copy."""

    hf_config: dict[str, Any]
    train: Layout
    rollout: EngineLayout
    contract: PrecisionContract
    seed: int
    dump: Path | None

    @property
    def model(self) -> ModelGeometry:
        return ModelGeometry.from_hf_config(self.hf_config)

    def make_plan(self, settings: SyncConfig) -> SyncPlan:
        return SyncPlan.make(self.model, self.train, self.rollout, self.contract, settings.chunk_bytes)


def make_hf_tensor(task: VerifyTask, tensor: HFTensor) -> torch.Tensor:
    """Return the random checkpoint tensor of that name, identical in every process: FP32 masters if its role is quantized, else high
    precision."""
    generator = torch.Generator().manual_seed(task.seed * 0x1_0000_0000 + zlib.crc32(tensor.name.encode()))
    format = task.contract.format_of(tensor.role)
    return torch.randn(tensor.shape, generator=generator).to(torch.float32 if format.quantized else getattr(torch, format.dtype))


def build_trainer_tensors(task: VerifyTask, rank: int) -> dict[str, torch.Tensor]:
    """Return the tensors of one rank of a real Megatron model. Masters are dropped once quantized, so that large models fit in memory."""
    start_megatron(task.train, task.seed)
    model = build_model(task.hf_config, task.train, task.contract)
    shards, parameters = build_rank_shards(task.hf_config, task.train, rank), global_parameters(model)
    layers = {id(layer.weight): layer for layer in list_quantized_layers(model)}
    for shard in shards:
        layer = layers.get(id(parameters[shard.name]))
        values = parameters[shard.name].detach() if layer is None else torch.zeros(shard.shape)
        for region in shard.regions:
            view_rect(values, region.shard_rect).copy_(view_rect(make_hf_tensor(task, region.tensor), region.tensor_rect))
        if layer is not None:
            layer.quantize(values)
    return collect_named_tensors(model, shards, task.contract)


class InProcessEngine(EngineStub):
    def __init__(self, shards: Mapping[int, Sequence[Shard]], contract: PrecisionContract) -> None:
        self.ranks = {rank: EngineRankStub(own, make_stored_tensors(own, contract.format_of)) for rank, own in shards.items()}

    def _ask_ranks(self, request: dict[str, Any]) -> list[dict[str, str]]:
        return [stub.answer(request, rank) for rank, stub in self.ranks.items()]


def find_differences(task: VerifyTask, engine: InProcessEngine, shards: Mapping[int, Sequence[Shard]]) -> Iterator[str]:
    """Describe each engine rectangle whose bytes differ from the checkpoint tensor, quantized as a whole."""
    copies: dict[str, list[tuple[int, Shard, Region]]] = {}
    for rank, rank_shards in shards.items():
        for shard in rank_shards:
            for region in shard.regions:
                copies.setdefault(region.tensor.name, []).append((rank, shard, region))
    for tensor_copies in copies.values():
        tensor = tensor_copies[0][2].tensor
        format, value = task.contract.format_of(tensor.role), make_hf_tensor(task, tensor)
        quantized = quantize(value, format) if format.quantized else None
        for rank, shard, region in tensor_copies:
            tensors, rect, source_rect = engine.ranks[rank].tensors, region.shard_rect, region.tensor_rect
            same = {"values": _same(tensors[shard.name], rect, quantized.data if quantized else value, source_rect)}
            if quantized:
                scales, scale_rect = tensors[format.scale_name(shard.name)], get_scale_rect(rect, format)
                same["scales"] = _same(scales, scale_rect, quantized.scale, get_scale_rect(source_rect, format))
            for kind in [kind for kind, equal in same.items() if not equal]:
                wrong = scale_rect if kind == "scales" else rect
                yield f"engine rank {rank}: {kind} of {shard.name}, rows {wrong.row}..{wrong.row + wrong.rows - 1}, from {tensor.name}"


def _same(values: torch.Tensor, rect: Rect, expected: torch.Tensor, expected_rect: Rect) -> bool:
    actual_bytes, expected_bytes = (raw_bytes(view_rect(tensor, within)) for tensor, within in ((values, rect), (expected, expected_rect)))
    return values.dtype == expected.dtype and np.array_equal(actual_bytes, expected_bytes)


def sync_and_compare(task: VerifyTask, rank: int) -> Any:
    """Sync a model with random weights. Rank 0 holds the engine, compares the bytes, and returns the report."""
    settings = SyncConfig(bucket_mb=64)
    plan, named_tensors = task.make_plan(settings), build_trainer_tensors(task, rank)
    engine: Rank0[Any] = Rank0(lambda: InProcessEngine(plan.targets, task.contract))
    sync = WeightSync(plan, engine, lambda: named_tensors, settings)
    try:
        report = sync.run(1)
    finally:
        sync.close()
    if rank != 0:
        return None
    if task.dump:
        write_dump(task, engine.value, task.dump)
    return {
        "parameters": report.tensors,
        "derived": report.derived,
        "blocks": report.blocks,
        "bytes_moved": report.bytes,
        "bytes_across_ranks": sum(each.nbytes for each in plan.transfers if each.source_rank != each.target_rank),
        "differences": list(find_differences(task, engine.value, plan.targets)),
    }


def write_dump(task: VerifyTask, engine: InProcessEngine, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    source = {name: make_hf_tensor(task, tensor) for name, tensor in task.model.tensors().items()}
    save_file(source, folder / "hf.safetensors", metadata={"format": "pt"})
    for rank, stub in engine.ranks.items():
        save_file(dict(stub.tensors), folder / f"rollout_rank{rank}.safetensors", metadata={"format": "pt"})


def read_hf_config(path: Path, layers: int | None) -> dict[str, Any]:
    """Read a config.json and reduce the model to `layers` layers. Raise UserError for bad input."""
    config = dict(unwrap(read_object(path / "config.json" if path.is_dir() else path, "--hf-config")))
    if layers is not None:
        config["num_hidden_layers"] = min(layers, config.get("num_hidden_layers", layers))
        config |= {name: config[name][:layers] for name in _BY_LAYER if isinstance(config.get(name), list)}
    config.setdefault("max_position_embeddings", 4096)
    return config | _NOT_ABOUT_WEIGHTS


def main(
    hf_config: Annotated[Path, typer.Option(help="A config.json, or the folder that contains it.")],
    train: Annotated[str, typer.Option(help="Trainer layout: tp, pp, vpp, ep, etp, dp, cp; for example tp=4,pp=2.")] = "tp=1",
    rollout: Annotated[str, typer.Option(help="Engine layout: tp and ep; for example tp=2.")] = "tp=1",
    layers: Annotated[int | None, typer.Option(help="Reduce the model to this many layers.")] = None,
    seed: int = 0,
    scale_format: Literal["pow2", "fp32"] = "pow2",
    dump: Annotated[Path | None, typer.Option(help="Write hf.safetensors and rollout_rankR.safetensors to this folder.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Check that every byte of every engine parameter equals the quantized checkpoint."""
    with as_user_error():
        config = read_hf_config(hf_config, layers)
        layout = Layout(**parse_sizes("--train", train, ("tp", "pp", "vpp", "ep", "etp", "dp", "cp")))
        contract = PrecisionContract.from_config(PrecisionConfig(mode="fp8_unified", scale_format=scale_format))
        engine = EngineLayout(**parse_sizes("--rollout", rollout, ("tp", "ep")))
        task = VerifyTask(config, layout, engine, contract, seed, dump)
        task.make_plan(SyncConfig())  # refuses bad layouts before any process starts
        report = run_on_ranks(partial(sync_and_compare, task), layout.world_size)
    for name, value in report.items():
        print(f"{name:20s} {len(value) if isinstance(value, list) else value}")
    for line in report["differences"][:10]:
        print(f"  differs: {line}")
    write_json(json_file, report)
    raise typer.Exit(1 if report["differences"] else 0)


if __name__ == "__main__":
    run_script(main)
