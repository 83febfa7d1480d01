"""Rehearses small models, with and without planted faults. Prints a JSON object of case -> ranks' reports.

python -m support.rehearsals FOLDER CASE...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from support.families import ARCHITECTURES

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
    from megatron_rl.mcore.layers.attention.core_attention import CoreAttention

    return replaced(CoreAttention, "forward", lambda plain: lambda self, *args, **options: change(plain(self, *args, **options)))


def item_per_layer() -> Any:
    def read(result: Any) -> Any:
        result.sum().item()
        return result

    return _in_attention(read)


def doubled_activation(times: int = 4) -> Any:
    def widen(result: Any) -> Any:
        for _ in range(times):  # each keeps its factors for the backward pass
            result = result * result.detach().clone()
        return result

    return _in_attention(widen)


def gather_in_wrong_group() -> Any:
    from megatron.core import parallel_state

    from megatron_rl.kernels.linear import gather

    def make(plain: Any) -> Any:
        return lambda x, group: plain(x, parallel_state.get_data_parallel_group())

    return replaced(gather, "gather_first", make)


def gather_among_context_ranks() -> Any:
    """Activations are gathered in the context-parallel group, which has the size of the tensor-parallel group."""
    from megatron.core import parallel_state

    from megatron_rl.kernels.linear import gather

    def make(plain: Any) -> Any:
        return lambda x, group: plain(x, parallel_state.get_context_parallel_group())

    return replaced(gather, "gather_first", make)


def context_in_tensor_ranks() -> Any:
    """Queries are exchanged with ranks that hold other heads."""
    from dataclasses import replace

    from megatron.core import parallel_state

    from megatron_rl.mcore.passes.context_parallel import ContextShard

    def make(plain: Any) -> Any:
        def shard(cls: Any, lengths: list[int]) -> Any:
            return replace(plain.__func__(cls, lengths), group=parallel_state.get_tensor_model_parallel_group())

        return classmethod(shard)

    return replaced(ContextShard, "for_this_rank", make)


def tokens_among(get_group: str) -> Any:
    """Tokens are sent to the ranks of a group of `parallel_state`."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def make(plain: Any) -> Any:
        def start(self: Any, *args: Any, **options: Any) -> None:
            plain(self, *args, **options)
            self.ep_group = getattr(parallel_state, get_group)()

        return start

    return replaced(MoEAlltoAllTokenDispatcher, "__init__", make)


tokens_among_replicas = partial(tokens_among, "get_expert_data_parallel_group")
"""Tokens are sent to the ranks that have the same experts."""
tokens_among_parts_of_experts = partial(tokens_among, "get_expert_tensor_parallel_group")
"""Tokens are sent to the ranks that have other shards of the same experts."""


def experts_among_replicas() -> Any:
    """Weights of experts are not marked as having other replicas."""

    def make(plain: Any) -> Any:
        def wrap(chunks: Any, train: Any) -> Any:
            for weight in (weight for chunk in chunks for weight in chunk.parameters()):
                weight.allreduce = True
            return plain(chunks, train)

        return wrap

    from megatron_rl.mcore import actor

    return replaced(actor, "wrap_chunks", make)


def backward_among_experts_ranks() -> Any:
    """Only the gradient of the output layer's gathered input is sent to ranks with other experts."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    def make(plain: Any) -> Any:
        def backward(ctx: Any, gradient: Any) -> Any:
            ctx.group = parallel_state.get_expert_model_parallel_group()
            return plain.__func__(ctx, gradient)

        return staticmethod(backward)

    return replaced(mappings._GatherFromSequenceParallelRegion, "backward", make)


def sum_from_unknown_line() -> Any:
    """A function that is not in the table all-reduces log-probs."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_rl.algorithm.policy_loss import PolicyLoss

    def make(plain: Any) -> Any:
        def call(self: Any, logprobs: Any, batch: Any) -> Any:
            dist.all_reduce(logprobs.detach().clone(), group=parallel_state.get_tensor_model_parallel_group())
            return plain(self, logprobs, batch)

        return call

    return replaced(PolicyLoss, "__call__", make)


def routes_counted_in_passes() -> Any:
    """Tokens of experts are not counted before a pass."""
    from megatron_rl.mcore.layers.moe.router import ModelRouters

    return replaced(ModelRouters, "count_ahead", lambda _: lambda self, batches: [{}] * len(batches))


def refused_scales() -> Any:
    from megatron_rl.kernels.linear.deep_gemm import DeepGemmBackend

    def make(plain: Any) -> Any:
        def prepare(self: Any, blocks: Any, row_order: Any) -> Any:
            weight = plain(self, blocks, row_order)
            data, scale = weight.fprop
            return weight._replace(fprop=(data, scale[:-1]))

        return prepare

    return replaced(DeepGemmBackend, "prepare", make)


def module_without_a_share() -> Any:
    """A module of the MLP has no `sharded_state_dict`, which Megatron calls for a checkpoint."""
    import torch
    from megatron.core.transformer.mlp import MLP

    def make(plain: Any) -> Any:
        def share(self: Any, *args: Any, **options: Any) -> Any:
            self.activation_func = torch.nn.Identity()
            return plain(self, *args, **options)

        return share

    return replaced(MLP, "sharded_state_dict", make)


def part_at_another_place() -> Any:
    """The first rank's columns of a weight are saved at the place of the second rank's."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    def make(plain: Any) -> Any:
        def share(self: Any, *args: Any, **options: Any) -> Any:
            parts = plain(self, *args, **options)
            for part in (part for part in parts.values() if isinstance(part, ShardedTensor)):
                offset = (*part.global_offset[:-1], part.local_shape[-1] - part.global_offset[-1])
                object.__setattr__(part, "global_offset", offset)
            return parts

        return share

    return replaced(RowParallelLinear, "sharded_state_dict", make)


WIDE = TINY | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "vocab_size": 128256,
}
"""A model with realistic widths, so that memory which the plan ignores is relatively small."""
LLAMA = WIDE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3}
EXPERTS = WIDE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
TINY_EXPERTS = EXPERTS | {name: value for name, value in TINY.items() if name not in ("architectures", "model_type")}
GLM = ARCHITECTURES["glm4_moe"] | {
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "n_routed_experts": 16,
    "moe_intermediate_size": 1536,
    "num_nextn_predict_layers": 0,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
GLM_MTP = GLM | {"num_nextn_predict_layers": 1}
DEEPSEEK = ARCHITECTURES["deepseek_v3"] | {
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "num_hidden_layers": 3,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "moe_intermediate_size": 1536,
    "num_nextn_predict_layers": 1,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
ENGINES = "--rollout.engines"
TWO = ["--train.layout.tp=2", "--train.layout.dp=2", f"{ENGINES}=4"]
EP = ["--train.layout.tp=2", "--train.layout.ep=2", "--train.layout.etp=1", "--train.layout.dp=2", f"{ENGINES}=4"]
ETP = ["--train.layout.tp=2", "--train.layout.ep=2", "--train.layout.etp=2", "--train.layout.dp=2", f"{ENGINES}=4"]
EP_ALONE = ["--train.layout.ep=2", "--train.layout.dp=4", f"{ENGINES}=4"]
MTP = ["--train.mtp_loss_scaling_factor=0.1"]
CP = ["--train.layout.cp=2", "--train.layout.tp=2", f"{ENGINES}=4"]
REPLAY = [*EP, "--algorithm.routing_replay=engine", "--algorithm.kl_coef=0"]
DEEP_GEMM = ["--precision.backend=deep_gemm", "--precision.masters=spread"]
BF16 = ["--precision.mode=bf16"]
TREE = ["--precision.reduction=tree"]
ATTENTION = '--lora.targets=["linear_qkv", "linear_proj"]'


class Case(NamedTuple):
    overrides: list[str]
    plant: Callable[[], Any] | None = None
    model: dict[str, Any] = TINY
    teacher: dict[str, Any] | None = None


CASES = {
    "plain": Case([*TWO, "--precision.masters=spread"]),
    "host_tensor_in_loss": Case([], host_tensor_in_loss),
    "item_per_layer": Case(TWO, item_per_layer),
    "doubled_activation": Case(TWO, doubled_activation),
    "gather_in_wrong_group": Case(TWO, gather_in_wrong_group),
    "gather_among_context_ranks": Case(CP, gather_among_context_ranks),
    "refused_scales": Case(DEEP_GEMM, refused_scales),
    "module_without_a_share": Case(TWO, module_without_a_share),
    "part_at_another_place": Case(TWO, part_at_another_place),
    "replay": Case(REPLAY, model=TINY_EXPERTS),
    "replay: routes_counted_in_passes": Case(REPLAY, routes_counted_in_passes, TINY_EXPERTS),
    # other families and layouts
    "llama": Case(["--train.layout.tp=4", f"{ENGINES}=4"], model=LLAMA),
    "llama, bf16, recomputed": Case([*TWO, *BF16, "--train.recompute=selective"], model=LLAMA),
    "experts": Case(EP, model=EXPERTS),
    "experts, deep_gemm": Case([*EP, "--precision.backend=deep_gemm"], model=EXPERTS),
    "experts, bf16": Case([*EP, *BF16], model=EXPERTS),
    "experts, cut": Case(ETP, model=EXPERTS),
    "experts, by the tree": Case([*EP, *TREE], model=EXPERTS),
    "experts, recomputed, by the tree": Case([*EP, *TREE, "--train.recompute=full"], model=EXPERTS),
    "experts, cut, by the tree": Case([*ETP, *TREE], model=EXPERTS),
    "experts, cut, adapters, by the tree": Case([*ETP, *TREE, "--lora.rank=16", ATTENTION], model=EXPERTS),
    "experts alone": Case(EP_ALONE, model=EXPERTS),
    "recomputed": Case([*TWO, "--train.recompute=selective"], model=WIDE),
    "experts, recomputed": Case([*EP, "--train.recompute=selective"], model=EXPERTS),
    "context parallel": Case(CP, model=WIDE),
    "pipeline": Case(["--train.layout.pp=2", "--train.layout.tp=2", f"{ENGINES}=4"], model=WIDE),
    "virtual stages": Case(
        ["--train.layout.pp=2", "--train.layout.vpp=2", "--train.layout.tp=2", f"{ENGINES}=4"], model=WIDE | {"num_hidden_layers": 8}
    ),
    "critic": Case([*TWO, "--algorithm.name=ppo"], model=WIDE),
    "critic, disaggregated": Case([*TWO, "--algorithm.name=ppo", "--placement.kind=disaggregated"], model=WIDE),
    "critic, stages": Case(["--train.layout.pp=2", "--train.layout.tp=2", f"{ENGINES}=4", "--algorithm.name=ppo"], model=WIDE),
    "critic, experts, bf16": Case([*EP, *BF16, "--algorithm.name=ppo"], model=EXPERTS),
    "adapters": Case([*TWO, "--lora.rank=16", *TREE], model=WIDE),
    "experts, adapters": Case([*EP, "--lora.rank=16", ATTENTION], model=EXPERTS),
    "a teacher": Case(TWO, model=LLAMA, teacher=WIDE),
    "disaggregated": Case([*TWO, "--placement.kind=disaggregated"], model=WIDE),
    "glm": Case(EP, model=GLM),
    "glm, mtp": Case([*EP, *MTP], model=GLM_MTP),
    "glm, mtp, stages": Case([*EP[:-1], "--train.layout.pp=2", f"{ENGINES}=8", *MTP], model=GLM_MTP | {"num_hidden_layers": 4}),
    "glm, mtp, recomputed": Case([*EP, *MTP, "--train.recompute=full"], model=GLM_MTP),
    "deepseek, mtp": Case([*EP, *MTP, *BF16], model=DEEPSEEK),
    "experts: host_tensor_in_loss": Case(EP, host_tensor_in_loss, EXPERTS),
    "experts: item_per_layer": Case(EP, item_per_layer, EXPERTS),
    "experts: doubled_activation": Case(EP, partial(doubled_activation, 16), EXPERTS),
    "experts: gather_in_wrong_group": Case(EP, gather_in_wrong_group, EXPERTS),
    "context_in_tensor_ranks": Case(CP, context_in_tensor_ranks),
    "experts: tokens_among_replicas": Case(EP, tokens_among_replicas, EXPERTS),
    "experts: tokens_among_parts_of_experts": Case(ETP, tokens_among_parts_of_experts, EXPERTS),
    "experts: backward_among_experts_ranks": Case(ETP, backward_among_experts_ranks, EXPERTS),
    "experts: experts_among_replicas": Case(EP_ALONE, experts_among_replicas, EXPERTS),
    "sum_from_unknown_line": Case(TWO, sum_from_unknown_line),
    "experts: refused_scales": Case([*EP, "--precision.backend=deep_gemm"], refused_scales, EXPERTS),
}


def main(folder: Path, names: list[str]) -> None:
    from contextlib import nullcontext

    from megatron_rl.cli.rehearse import choose_ranks, install_device

    install_device()
    from megatron_rl.config import load_config
    from megatron_rl.cost.hardware import Cluster
    from megatron_rl.cost.workload import Workload
    from megatron_rl.rehearsal.job import rehearse_rank
    from megatron_rl.rehearsal.report import make_report

    (folder / "run.toml").write_text(CONFIG.format(folder=folder))
    cluster, found = Cluster.from_options(1, 8, "h100"), {}
    for name in names:
        overrides, plant, model, teacher = CASES[name]
        (folder / "config.json").write_text(json.dumps(model))
        if teacher is not None:
            (folder / "teacher").mkdir()
            (folder / "teacher" / "config.json").write_text(json.dumps(teacher))
            overrides = [*overrides, f"--teacher.path={folder / 'teacher'}"]
        config = load_config(folder / "run.toml", overrides)
        job = Workload.from_config(config, model)
        with plant() if plant else nullcontext():
            ranks = choose_ranks(None, config.train.layout.to_layout())
            found[name] = [make_report(rehearse_rank(config, rank, cluster.gpu), job, cluster).as_json() for rank in ranks]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
