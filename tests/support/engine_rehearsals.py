"""Rehearses engines of small models, with and without planted faults. Prints a JSON object of case -> rank.

python -m support.engine_rehearsals FOLDER CASE...
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from support.families import ARCHITECTURES
from support.rehearsals import CONFIG, EXPERTS, TINY

LATENT = ARCHITECTURES["deepseek_v3"] | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}
ROUTER = LATENT | {"hidden_size": 7168, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
"""DeepSeek-V3 with its router."""
TWO = ["--rollout.tp=2", "--rollout.engines=1", "--rollout.max_running_requests=16"]


def _around_linear(change: Callable[[Any, Any, Any], Any]) -> None:
    """Replace the computation of FP8 linear layers by `change(plain, layer, x)`."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    plain = Fp8LinearMethod.apply
    Fp8LinearMethod.apply = lambda self, layer, x, bias=None: change(lambda rows: plain(self, layer, rows, bias), layer, x)  # type: ignore[method-assign]


def wrong_dtype() -> None:
    """RMSNorm receives FP32, which its kernel does not support."""
    _around_linear(lambda plain, layer, x: plain(x).float())


def misaligned_weight() -> None:
    """DeepGEMM receives a weight at an address that is not a multiple of 16."""
    import torch

    def change(plain: Any, layer: Any, x: Any) -> Any:
        memory = torch.empty(layer.weight.numel() + 8, dtype=torch.float8_e4m3fn, device="cuda")
        layer._parameters["weight"] = torch.nn.Parameter(memory[8:].view(layer.weight.shape), requires_grad=False)
        return plain(x)

    _around_linear(change)


def unknown_kernel() -> None:
    """A library kernel without a shape function is called."""
    import sgl_kernel

    _around_linear(lambda plain, layer, x: sgl_kernel.gelu_quick(plain(x)))


def wrong_precision() -> None:
    """A layer multiplies in BF16."""
    import torch
    from sglang.srt.layers.linear import RowParallelLinear

    def change(plain: Any, layer: Any, x: Any) -> Any:
        name = getattr(layer, "prefix", "")
        return torch.nn.functional.linear(x, layer.weight.to(x.dtype)) if name.endswith("o_proj") else plain(x)

    _around_linear(change)
    start = RowParallelLinear.__init__

    def init(self: Any, *args: Any, **named: Any) -> None:
        start(self, *args, **named)
        self.prefix = named.get("prefix", "")

    RowParallelLinear.__init__ = init  # type: ignore[method-assign]


def item_per_layer() -> None:
    import torch

    def change(plain: Any, layer: Any, x: Any) -> Any:
        result = plain(x)
        if not torch.cuda.is_current_stream_capturing():
            result.sum().item()
        return result

    _around_linear(change)


def item_while_captured() -> None:
    def change(plain: Any, layer: Any, x: Any) -> Any:
        result = plain(x)
        result.sum().item()
        return result

    _around_linear(change)


class Case(NamedTuple):
    overrides: list[str]
    plant: Callable[[], None] | None = None
    model: dict[str, Any] = TINY


CASES = {
    "dense": Case(TWO),
    "experts": Case([*TWO, "--rollout.ep=2"], model=EXPERTS | {"num_hidden_layers": 2}),
    "bf16": Case([*TWO, "--precision.mode=bf16"]),
    "int8": Case([*TWO, "--precision.mode=int8_rollout"]),
    "tree": Case([*TWO, "--precision.reduction=tree"]),
    "disaggregated": Case([*TWO, "--placement.kind=disaggregated"]),
    "latent": Case(TWO, model=LATENT),
    "router": Case(TWO, model=ROUTER),
    "int8 experts": Case([*TWO, "--rollout.ep=2", "--precision.mode=int8_rollout"], model=EXPERTS | {"num_hidden_layers": 2}),
    "wrong_dtype": Case(TWO, wrong_dtype),
    "misaligned_weight": Case(TWO, misaligned_weight),
    "unknown_kernel": Case(TWO, unknown_kernel),
    "wrong_precision": Case(TWO, wrong_precision),
    "item_per_layer": Case(TWO, item_per_layer),
    "item_while_captured": Case(TWO, item_while_captured),
}


def _run(folder: Path, name: str) -> Any:
    from dataclasses import asdict

    from megatron_rl.config import load_config
    from megatron_rl.cost.hardware import GPUS
    from rollout_sglang.rehearsal.rank import describe_job, run_rank

    overrides, plant, model = CASES[name]
    own = folder / name.replace(" ", "_")
    own.mkdir()
    (own / "config.json").write_text(json.dumps(model))
    (own / "run.toml").write_text(CONFIG.format(folder=own))
    config = load_config(own / "run.toml", overrides)
    if plant:
        plant()
    with describe_job(config) as (arguments, chunks):
        return asdict(run_rank(arguments, config, asdict(GPUS["h100"]), 0, chunks(0), True))


def main(folder: Path, names: list[str]) -> None:
    from rollout_sglang.rehearsal import rank as rehearsed_rank

    rehearsed_rank.install_gpu()
    rehearsed_rank.import_sglang()
    answer, sys.stdout = sys.stdout, sys.stderr
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        found = pool.starmap(_run, [(folder, name) for name in names], chunksize=1)
    print(json.dumps(dict(zip(names, found, strict=True))), file=answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
