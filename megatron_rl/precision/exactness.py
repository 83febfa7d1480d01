"""Whether the log-probs of engine and trainer are guaranteed to be equal, bit for bit."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.config import Config
from megatron_rl.precision.contract import PrecisionContract
from parallel.model_geometry import ModelGeometry

GPU_KERNELS = {
    "attention": "FlashAttention 2 in the trainer, SGLang's backend in the engine",
    "lm_head and other products in high precision": "cuBLAS adds in an order that follows the number of rows",
    "router and experts": "SGLang's kernels add in an order of their own",
}
"""Operators that trainer and engine compute by different kernels on GPUs, unless `precision.reduction` is "ranks"."""


def list_inexact(config: Config, hf_config: Mapping[str, Any], on_gpu: bool) -> list[str]:
    """Return the reasons why |Δ log p| between engine and trainer may differ from 0. Empty if it must be 0. `on_gpu`: whether trainer and
    engine run on GPUs."""
    contract, model = PrecisionContract.from_config(config.precision), ModelGeometry.from_hf_config(hf_config)
    layout, engine = config.train.layout, config.rollout
    reasons = []
    if on_gpu and not contract.sums_by_ranks:  # which refuses a run with another kernel (`diagnosis.graph_check`)
        operators = [name for name in GPU_KERNELS if model.experts is not None or "expert" not in name]
        reasons += [f"GPUs, {name}: {GPU_KERNELS[name]}" for name in operators]
    if contract.trainer_format != contract.engine_format:
        reasons.append(f"precision.mode = {contract.mode}: the engine alone is quantized")
    if (layout.tp > 1 or layout.etp not in (None, 1) or engine.tp > 1) and not (contract.sums_by_tree or contract.sums_by_ranks):
        reasons.append("tensor parallelism without precision.reduction = tree or ranks: sums in another order")
    if "attention_backend" in engine.sglang and not (on_gpu and contract.sums_by_ranks):  # which has one backend, refusing others
        reasons.append("rollout.sglang.attention_backend: the engine decodes in an order of sums that depends on the number of keys")
    return reasons
