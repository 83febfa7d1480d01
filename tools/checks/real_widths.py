"""Train layers of the real widths of a large model for two steps on this machine's CPUs, and sync them into engine shards, proved.

    python tools/checks/real_widths.py qwen3-32b --train tp=4,pp=2 --rollout tp=4
    python tools/checks/real_widths.py qwen3-235b-a22b --train ep=4,dp=4 --rollout tp=4,ep=4

Hidden size and heads are the model's own; layers, words, MLP width or number of experts are cut to what 24 GB hold, as printed. The ranks
are gloo processes: they load a random checkpoint, train in unified FP8, and sync before the first step and after each. The engine ranks are
tensors of SGLang's names and shapes on rank 0, filled by the engine's own code. Exit code 0 only where every sync is proved.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from megatron_rl.config import PrecisionConfig, TrainConfig  # sets how threads wait, so it comes before torch

# isort: split
import torch
import typer
from verify_sync import InProcessEngine, run_on_ranks

from megatron_rl.algorithm.policy_loss import PolicyLoss
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.config.sync import SyncConfig
from megatron_rl.distributed import Rank0, gather_from_ranks
from megatron_rl.errors import MegatronRLError, UserError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import cut_into_files, name_file, write_all_but_weights, write_file, write_index
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.model import build_model, start_megatron
from megatron_rl.mcore.passes.replicas import select_own
from megatron_rl.mcore.weights.load_weights import build_rank_shards, collect_named_tensors, global_parameters, load_checkpoint
from megatron_rl.mcore.weights.master_spread import MasterSpread
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.sync.plan import SyncPlan
from megatron_rl.sync.weight_sync import WeightSync
from parallel.layout import EngineLayout, Layout, parse_sizes
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "intermediate_size": 12800, "num_hidden_layers": 2, "vocab_size": 4096, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "attention_bias": False, "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}  # fmt: skip
_EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-32b": _QWEN3,  # 64 layers, MLPs of 25,600 and 151,936 words in the whole
    "qwen3-235b-a22b": {
        **_QWEN3,
        "hidden_size": 4096,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
        **_EXPERTS,
    },  # 94 layers, 128 experts
}


def make_checkpoint(folder: Path, hf_config: dict[str, Any], std: float = 0.02) -> None:
    """Write random BF16 weights, one file after the other."""
    tensors = ModelGeometry.from_hf_config(hf_config).tensors()

    def make(name: str) -> torch.Tensor:
        rows, cols = tensors[name].rows, tensors[name].cols
        return torch.ones(rows).bfloat16() if tensors[name].vector else torch.empty((rows, cols), dtype=torch.bfloat16).normal_(std=std)

    torch.manual_seed(0)
    files = cut_into_files({name: 2 * tensor.rows * tensor.cols for name, tensor in tensors.items()}, file_bytes=1 << 28)
    numbered = ((folder / name_file(number, len(files)), names) for number, names in enumerate(files))
    write_index(folder, [write_file(path, {name: make(name) for name in names}) for path, names in numbered])
    write_all_but_weights(folder, hf_config, None)


def make_samples(vocabulary: int) -> list[TrainingSample]:
    """Return eight answers of random tokens with advantages of both signs."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (8, 48), generator=generator)
    return [TrainingSample(row[:16], row[16:], advantage=(-1.0) ** number) for number, row in enumerate(ids)]


def train_and_sync(folder: Path, layout: Layout, rollout: EngineLayout, rank: int) -> dict[str, Any]:
    """Run on every rank: sync, and two steps with a sync after each. Return the report."""
    start_megatron(layout, seed=0)
    hf_config, contract, settings = read_config(folder), PrecisionContract.from_config(PrecisionConfig()), SyncConfig(bucket_mb=64)
    shards, train = build_rank_shards(hf_config, layout), TrainConfig(micro_batch_tokens=512)
    model = build_model(hf_config, layout, contract, train)
    spread = MasterSpread(train.seed, contract)
    load_checkpoint(model, folder, shards, spread)
    actor = Actor(model, train, temperature=1.0)
    spread.spread_optimizer(actor.optimizer, shards, global_parameters(model))
    geometry = ModelGeometry.from_hf_config(hf_config)
    plan = SyncPlan.make(geometry, layout, rollout, contract, settings.chunk_bytes)
    engine: Rank0[Any] = Rank0(lambda: InProcessEngine(plan.targets, contract))
    sync = WeightSync(plan, engine, partial(collect_named_tensors, model, shards, contract), settings)
    reports, steps, samples = [sync.run(0)], [], select_own(make_samples(hf_config["vocab_size"]))
    for version in (1, 2):
        logprobs_B, entropy = actor.compute_logprobs(samples)
        for sample, logprobs in zip(samples, logprobs_B, strict=True):
            sample.old_logprobs = logprobs
        steps.append({"entropy": entropy, **actor.update(samples, PolicyLoss(AlgorithmConfig()))})
        reports.append(sync.run(version))
    sync.close()
    peaks = gather_from_ranks(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
    return {
        "parameters (millions)": round(
            sum(tensor.rows * tensor.cols for tensor in ModelGeometry.from_hf_config(hf_config).tensors().values()) / 1e6, 1
        ),
        "entropy (nats)": [round(step["entropy"], 4) for step in steps],
        "norm of the gradient": [round(step["grad_norm"], 4) for step in steps],
        "response": [round(step["precision/response"], 3) for step in steps],
        "engine tensors proved, of all": [(report.proved, report.tensors) for report in reports],
        "bytes a sync": reports[0].bytes,
        "peak of rank 0, and of the largest other (GiB)": (round(peaks[0], 2), round(max(peaks[1:]), 2)),
    }


def main(
    model: Annotated[str, typer.Argument(help=", ".join(MODELS))],
    train: Annotated[str, typer.Option(help="tp, pp, vpp, ep, etp, dp, cp: for example tp=4,pp=2")] = "tp=4,pp=2",
    rollout: Annotated[str, typer.Option(help="tp and ep of the engine: for example tp=4")] = "tp=4",
    folder: Annotated[Path | None, typer.Option(help="Where the checkpoint is written for as long as it is needed.")] = None,
) -> None:
    """Train two steps and prove three syncs."""
    try:
        if model not in MODELS:
            raise UserError("MODEL", model, f"must be one of {', '.join(MODELS)}", "choose one")
        layout = Layout(**parse_sizes("--train", train, ("tp", "pp", "vpp", "ep", "etp", "dp", "cp")))
        engine = EngineLayout(**parse_sizes("--rollout", rollout, ("tp", "ep")))
        with tempfile.TemporaryDirectory(dir=folder) as checkpoint:
            make_checkpoint(Path(checkpoint), MODELS[model])
            report = run_on_ranks(partial(train_and_sync, Path(checkpoint), layout, engine), layout.world_size)
    except (MegatronRLError, GeometryError) as error:
        print(f"real_widths: {error}", file=sys.stderr)
        raise typer.Exit(getattr(error, "exit_code", 2)) from None
    for name, value in {**MODELS[model], **report}.items():
        print(f"{name:48s} {value}")


if __name__ == "__main__":
    typer.run(main)
