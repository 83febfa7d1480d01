"""Rehearses small models, with and without planted faults. Prints a JSON object of case -> ranks' reports.

python -m support.rehearsals FOLDER CASE...
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

from support.families import ARCHITECTURES
from support.shipped import rehearse_ranks

TINY = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 2048, "head_dim": 128}
TINY |= {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 8192}
TINY |= {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "torch_dtype": "bfloat16"}
TINY |= {"tie_word_embeddings": False, "attention_bias": False}
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
_WIDTHS = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
WIDE = TINY | _WIDTHS | {"intermediate_size": 12288, "num_hidden_layers": 4}
"""A model with realistic widths, so that memory which the plan ignores is relatively small."""
LLAMA = WIDE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3}
_QWEN3_MOE = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4}
_QWEN3_MOE |= {"moe_intermediate_size": 1536, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
EXPERTS, TINY_EXPERTS = WIDE | _QWEN3_MOE, TINY | _QWEN3_MOE
_SPARSE = _WIDTHS | {"intermediate_size": 10240, "num_hidden_layers": 3, "n_routed_experts": 16, "moe_intermediate_size": 1536}
_SPARSE |= {"num_nextn_predict_layers": 1, "max_position_embeddings": 8192}
GLM_MTP = ARCHITECTURES["glm4_moe"] | _SPARSE
GLM = GLM_MTP | {"num_nextn_predict_layers": 0}
DEEPSEEK = ARCHITECTURES["deepseek_v3"] | _SPARSE | {"num_key_value_heads": 32, "q_lora_rank": 1536, "kv_lora_rank": 512}


def _lay_out(engines=4, **sizes):
    """Return the options of a layout."""
    return [*(f"--train.layout.{name}={size}" for name, size in sizes.items()), f"--rollout.engines={engines}"]


TWO, CP, STAGES = _lay_out(tp=2, dp=2), _lay_out(cp=2, tp=2), _lay_out(pp=2, tp=2)
EP, ETP, EP_ALONE = _lay_out(tp=2, ep=2, etp=1, dp=2), _lay_out(tp=2, ep=2, etp=2, dp=2), _lay_out(ep=2, dp=4)
MTP = ["--train.mtp_loss_scaling_factor=0.1"]
REPLAY = [*EP, "--algorithm.routing_replay=engine", "--algorithm.kl_coef=0"]
DEEP_GEMM, SPREAD = ["--precision.backend=deep_gemm"], ["--precision.masters=spread"]
BF16, TREE = ["--precision.mode=bf16"], ["--precision.reduction=tree"]
RANKS = ["--precision.reduction=ranks", "--precision.scale_format=pow2"]
SELECTIVE, FULL = ["--train.recompute=selective"], ["--train.recompute=full"]
CRITIC, APART, LORA = ["--algorithm.name=ppo"], ["--placement.kind=disaggregated"], ["--lora.rank=16"]
ATTENTION = [*LORA, '--lora.targets=["linear_qkv", "linear_proj"]']
CASES = {
    "plain": ([*TWO, *SPREAD], TINY),
    "host_tensor_in_loss": ([], TINY),
    "item_per_layer": (TWO, TINY),
    "doubled_activation": (TWO, TINY),
    "gather_in_wrong_group": (TWO, TINY),
    "gather_among_context_ranks": (CP, TINY),
    "ranks": ([*TWO, *DEEP_GEMM, *RANKS], TINY),
    "ranks, bf16": ([*BF16, *DEEP_GEMM, *RANKS], TINY),
    "ranks, splits": ([*DEEP_GEMM, *RANKS], TINY | {"head_dim": 64}),
    "refused_scales": ([*DEEP_GEMM, *SPREAD], TINY),
    "module_without_a_share": (TWO, TINY),
    "part_at_another_place": (TWO, TINY),
    "replay": (REPLAY, TINY_EXPERTS),
    "replay: routes_counted_in_passes": (REPLAY, TINY_EXPERTS),
    # other families and layouts
    "llama": (_lay_out(tp=4), LLAMA),
    "llama, bf16, recomputed": ([*TWO, *BF16, *SELECTIVE], LLAMA),
    "experts": (EP, EXPERTS),
    "experts, deep_gemm": ([*EP, *DEEP_GEMM], EXPERTS),
    "experts, bf16": ([*EP, *BF16], EXPERTS),
    "experts, blackwell": (EP, EXPERTS),
    "experts, cut": (ETP, EXPERTS),
    "experts, by the tree": ([*EP, *TREE], EXPERTS),
    "experts, recomputed, by the tree": ([*EP, *TREE, *FULL], EXPERTS),
    "experts, cut, by the tree": ([*ETP, *TREE], EXPERTS),
    "experts, cut, adapters, by the tree": ([*ETP, *TREE, *ATTENTION], EXPERTS),
    "experts alone": (EP_ALONE, EXPERTS),
    "recomputed": ([*TWO, *SELECTIVE], WIDE),
    "experts, recomputed": ([*EP, *SELECTIVE], EXPERTS),
    "context parallel": (CP, WIDE),
    "pipeline": (STAGES, WIDE),
    "virtual stages": (_lay_out(pp=2, vpp=2, tp=2), WIDE | {"num_hidden_layers": 8}),
    "critic": ([*TWO, *CRITIC], WIDE),
    "critic, disaggregated": ([*TWO, *CRITIC, *APART], WIDE),
    "critic, stages": ([*STAGES, *CRITIC], WIDE),
    "critic, experts, bf16": ([*EP, *BF16, *CRITIC], EXPERTS),
    "adapters": ([*TWO, *LORA, *TREE], WIDE),
    "experts, adapters": ([*EP, *ATTENTION], EXPERTS),
    "a teacher": (TWO, LLAMA),
    "disaggregated": ([*TWO, *APART], WIDE),
    "glm": (EP, GLM),
    "glm, mtp": ([*EP, *MTP], GLM_MTP),
    "glm, mtp, stages": ([*_lay_out(8, tp=2, ep=2, etp=1, dp=2, pp=2), *MTP], GLM_MTP | {"num_hidden_layers": 4}),
    "glm, mtp, recomputed": ([*EP, *MTP, *FULL], GLM_MTP),
    "deepseek, mtp": ([*EP, *MTP, *BF16], DEEPSEEK),
    "deepseek, fp8, mtp": ([*EP, *MTP], DEEPSEEK),
    "deepseek, fp8, deep_gemm": ([*EP, *DEEP_GEMM], DEEPSEEK),
    "experts: host_tensor_in_loss": (EP, EXPERTS),
    "experts: item_per_layer": (EP, EXPERTS),
    "experts: doubled_activation": (EP, EXPERTS),
    "experts: gather_in_wrong_group": (EP, EXPERTS),
    "context_in_tensor_ranks": (CP, TINY),
    "experts: tokens_among_replicas": (EP, EXPERTS),
    "experts: tokens_among_parts_of_experts": (ETP, EXPERTS),
    "experts: backward_among_experts_ranks": (ETP, EXPERTS),
    "experts: experts_among_replicas": (EP_ALONE, EXPERTS),
    "sum_from_unknown_line": (TWO, TINY),
    "experts: refused_scales": ([*EP, *DEEP_GEMM], EXPERTS),
}
"""Case -> options and config.json. A name that ends with a function of `support.planted_faults` plants its fault."""
TEACHERS = {"a teacher": WIDE}


def main(folder, names):
    from megatron_rl.cli.rehearse import install_device

    install_device()
    from megatron_rl.config import load_config
    from megatron_rl.cost.hardware import Cluster
    from support import planted_faults

    (folder / "run.toml").write_text(CONFIG.format(folder=folder))
    found = {}
    for name in names:
        (overrides, model), plant = CASES[name], getattr(planted_faults, name.rpartition(": ")[2], nullcontext)
        (folder / "config.json").write_text(json.dumps(model))
        if name in TEACHERS:
            (folder / "teacher").mkdir()
            (folder / "teacher" / "config.json").write_text(json.dumps(TEACHERS[name]))
            overrides = [*overrides, f"--teacher.path={folder / 'teacher'}"]
        with plant():
            gpu = "b200" if name.endswith("blackwell") else "h100"
            found[name] = rehearse_ranks(load_config(folder / "run.toml", overrides), model, Cluster.from_options(1, 8, gpu))
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
