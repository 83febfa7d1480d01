"""Rehearses engines of small models, with and without planted faults. Prints a JSON object of case -> rank.

python -m engine_rehearsals FOLDER GPU CASE...
"""

import json
import multiprocessing
import os
import sys
from pathlib import Path

from support.families import ARCHITECTURES, CLASSES
from support.rehearsals import APART, BF16, CONFIG, EXPERTS, RANKS, TINY, TREE

LATENT = ARCHITECTURES["deepseek_v3"] | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}
ROUTER = LATENT | {"hidden_size": 7168, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
"""DeepSeek-V3 with its router."""
DELTA, DELTA_EXPERTS = (
    ARCHITECTURES[family] | {"architectures": [CLASSES[family]], "head_dim": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    for family in ("qwen3_5_text", "qwen3_next")
)
KV = ["--precision.kv=e4m3_per_layer"]
DEEP = TINY | {"num_hidden_layers": 4}
"""FlashInfer's plan waits up to three times at one line, which must not look like once in each layer."""
TWO = ["--rollout.tp=2", "--rollout.engines=1", "--rollout.max_running_requests=16"]
ONE = ["--rollout.engines=1", "--rollout.max_running_requests=16"]
EP, INT8 = ["--rollout.ep=2"], ["--precision.mode=int8_rollout"]


def _around_linear(change):
    """Replace the computation of FP8 linear layers by `change(plain, layer, x)`."""
    from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod

    plain = Fp8LinearMethod.apply
    Fp8LinearMethod.apply = lambda self, layer, x, bias=None: change(lambda rows: plain(self, layer, rows, bias), layer, x)


def wrong_dtype():
    """RMSNorm receives FP32, which its kernel does not support."""
    _around_linear(lambda plain, layer, x: plain(x).float())


def misaligned_weight():
    """DeepGEMM receives a weight at an address that is not a multiple of 16."""
    import torch

    def change(plain, layer, x):
        memory = torch.empty(layer.weight.numel() + 8, dtype=torch.float8_e4m3fn, device="cuda")
        layer._parameters["weight"] = torch.nn.Parameter(memory[8:].view(layer.weight.shape), requires_grad=False)
        return plain(x)

    _around_linear(change)


def unknown_kernel():
    """A library kernel without a shape function is called."""
    import sgl_kernel

    _around_linear(lambda plain, layer, x: sgl_kernel.gelu_quick(plain(x)))


def wrong_precision():
    """A layer multiplies in BF16."""
    import torch
    from sglang.srt.layers.linear import RowParallelLinear

    def change(plain, layer, x):
        name = getattr(layer, "prefix", "")
        return torch.nn.functional.linear(x, layer.weight.to(x.dtype)) if name.endswith("o_proj") else plain(x)

    _around_linear(change)
    start = RowParallelLinear.__init__

    def init(self, *args, **named):
        start(self, *args, **named)
        self.prefix = named.get("prefix", "")

    RowParallelLinear.__init__ = init


def _read_results(when):
    def change(plain, layer, x):
        result = plain(x)
        if when():
            result.sum().item()
        return result

    _around_linear(change)


def item_per_layer():
    import torch

    _read_results(lambda: not torch.cuda.is_current_stream_capturing())


def item_while_captured():
    _read_results(lambda: True)


CASES = {
    "dense": (TWO, TINY),
    "experts": ([*TWO, *EP], EXPERTS | {"num_hidden_layers": 2}),
    "bf16": ([*TWO, *BF16], TINY),
    "int8": ([*TWO, *INT8], TINY),
    "tree": ([*TWO, *TREE], TINY),
    "ranks": ([*TWO, *RANKS], TINY),
    "ranks, slices": ([*ONE, *RANKS, "--train.layout.tp=2"], TINY),
    "ranks, splits": ([*TWO, *RANKS, "--rollout.sglang.attention_backend=triton"], TINY),
    "ranks, bf16": ([*ONE, *RANKS, *BF16], TINY),
    "disaggregated": ([*TWO, *APART], TINY),
    "cache": ([*TWO, *KV], DEEP),
    "cache, disaggregated": ([*TWO, *KV, *APART], DEEP),
    "delta, cache": ([*TWO, *KV], DELTA),
    "latent": (TWO, LATENT),
    "latent, two nodes": ([*TWO, *APART, "--rollout.nodes_per_engine=2"], LATENT),
    "router": (TWO, ROUTER),
    "int8 experts": ([*TWO, *EP, *INT8], EXPERTS | {"num_hidden_layers": 2}),
    "delta": (TWO, DELTA),
    "delta experts": ([*TWO, *EP], DELTA_EXPERTS),
}
PLANTED = (wrong_dtype, misaligned_weight, unknown_kernel, wrong_precision, item_per_layer, item_while_captured)
"""Cases of a tiny dense model, by the name of the fault."""


def _run(folder, gpu, name):
    from megatron_rl.config import load_config
    from rollout_sglang.rehearsal.rank import describe_job, run_rank

    overrides, model = CASES.get(name, (TWO, TINY))
    own = folder / name.replace(" ", "_")
    own.mkdir()
    (own / "config.json").write_text(json.dumps(model))
    (own / "run.toml").write_text(CONFIG.format(folder=own))
    config = load_config(own / "run.toml", overrides)
    for plant in (plant for plant in PLANTED if plant.__name__ == name):
        plant()
    with describe_job(config) as (arguments, chunks):
        return run_rank(arguments, config, gpu, 0, chunks(0), True)


def main(folder, gpu, names):
    from megatron_rl.cost.hardware import GPUS
    from rollout_sglang.rehearsal import rank as rehearsed_rank

    os.environ["MEGATRON_RL_DELTA"] = "1"  # as every mode sets it that quantizes both sides or none
    if names[0].startswith("ranks"):  # hooks are chosen when SGLang is imported
        os.environ |= {"MEGATRON_RL_REDUCTION": "ranks", "MEGATRON_RL_ATTENTION": "triton" if "splits" in names[0] else "fa3"}
    rehearsed_rank.install_gpu(GPUS[gpu])
    rehearsed_rank.import_sglang()
    answer, sys.stdout = sys.stdout, sys.stderr
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        found = pool.starmap(_run, [(folder, GPUS[gpu], name) for name in names], chunksize=1)
    print(json.dumps(dict(zip(names, found, strict=True))), file=answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
