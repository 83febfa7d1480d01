"""Rehearses a tiny model, as it is and with planted faults, in a process of its own; prints one JSON object of case -> ranks' reports.

python -m support.rehearsals FOLDER CASE...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
}
CONFIG = """
[model]
path = "{folder}"
[precision]
mode = "fp8_unified"
backend = "transformer_engine"
reduction = "fast"
masters = "stored"
[train]
micro_batch_tokens = 4096
[rollout]
max_new_tokens = 1024
[data]
train = "rows.jsonl"
max_prompt_tokens = 1024
[algorithm]
kl_coef = 0.001
[reward]
function = "math"
[sync]
transport = "gloo"
bucket_mb = 8
"""


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    plain = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    setattr(owner, name, make(plain))
    try:
        yield
    finally:
        setattr(owner, name, plain)


def host_tensor_in_loss() -> Any:
    import torch

    from megatron_rl.algorithm.policy_loss import PolicyLoss

    def make(plain: Any) -> Any:
        def call(self: Any, logprobs: Any, batch: Any) -> Any:
            return plain(self, logprobs * torch.ones(batch.tokens.shape), batch)

        return call

    return replaced(PolicyLoss, "__call__", make)


def _in_attention(change: Callable[[Any], Any]) -> Any:
    from megatron_rl.mcore.layers.spec import CoreAttention

    return replaced(CoreAttention, "forward", lambda plain: lambda self, *args, **options: change(plain(self, *args, **options)))


def item_per_layer() -> Any:
    def read(result: Any) -> Any:
        result.sum().item()
        return result

    return _in_attention(read)


def doubled_activation() -> Any:
    def widen(result: Any) -> Any:
        for _ in range(4):  # each keeps its factors for the backward pass
            result = result * result.detach().clone()
        return result

    return _in_attention(widen)


def gather_in_wrong_group() -> Any:
    from megatron.core import parallel_state

    from megatron_rl.precision.backends import gather

    def make(plain: Any) -> Any:
        return lambda x, group: plain(x, parallel_state.get_data_parallel_group())

    return replaced(gather, "gather_first", make)


def refused_scales() -> Any:
    from megatron_rl.precision.backends.deep_gemm import DeepGemmBackend

    def make(plain: Any) -> Any:
        def prepare(self: Any, blocks: Any, row_order: Any) -> Any:
            weight = plain(self, blocks, row_order)
            data, scale = weight.fprop
            return weight._replace(fprop=(data, scale[:-1]))

        return prepare

    return replaced(DeepGemmBackend, "prepare", make)


TWO = ["--train.layout.tp=2", "--train.layout.dp=2", "--rollout.engines=4"]
DEEP_GEMM = ["--precision.backend=deep_gemm", "--precision.masters=spread"]
CASES: dict[str, tuple[list[str], Callable[[], Any] | None]] = {
    "plain": (TWO, None),
    "host_tensor_in_loss": ([], host_tensor_in_loss),
    "item_per_layer": (TWO, item_per_layer),
    "doubled_activation": (TWO, doubled_activation),
    "gather_in_wrong_group": (TWO, gather_in_wrong_group),
    "refused_scales": (DEEP_GEMM, refused_scales),
}


def main(folder: Path, names: list[str]) -> None:
    from contextlib import nullcontext

    from megatron_rl.rehearsal.no_device import load

    load()
    from megatron_rl.rehearsal import fake_cuda

    fake_cuda.install()
    from megatron_rl.cli.rehearse import choose_ranks
    from megatron_rl.config import load_config
    from megatron_rl.planner.candidate import Workload
    from megatron_rl.planner.hardware import Cluster
    from megatron_rl.rehearsal.job import rehearse_rank
    from megatron_rl.rehearsal.report import make_report

    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "run.toml").write_text(CONFIG.format(folder=folder))
    cluster, found = Cluster.from_options(1, 8, "h100"), {}
    for name in names:
        overrides, plant = CASES[name]
        config = load_config(folder / "run.toml", overrides)
        job = Workload.from_config(config, TINY)
        with plant() if plant else nullcontext():
            ranks = choose_ranks(None, config.train.layout.to_layout())
            found[name] = [make_report(rehearse_rank(config, rank, cluster.gpu), job, cluster).as_json() for rank in ranks]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
