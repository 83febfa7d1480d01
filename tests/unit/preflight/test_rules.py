"""Every rule of the preflight by a mistake that breaks it: all commands that know what the rule needs refuse it with the same line."""

from __future__ import annotations

import ast
import json
import shutil
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import ARCHITECTURES
from support.fp8_checkpoints import with_random_blocks
from support.geometries import PUBLISHED
from support.models import edit_config, make_checkpoint, make_model
from typer.testing import CliRunner

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.cli import evaluate
from megatron_rl.cli.main import app
from megatron_rl.config import load_config
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.kernels.linear import requirements
from megatron_rl.preflight import (
    EVAL,
    EVAL_MODEL,
    LAYOUTS,
    PLAN,
    RULES,
    TRAIN,
    Facts,
    Needs,
    check_on_rank_0,
    check_run,
    files,
    find_mistakes,
    layouts,
    machine,
    resumed_run,
    settings,
    teacher,
)  # fmt: skip
from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE
from parallel.formats import INT8, MODES, Mode

COMMANDS = {"train": TRAIN, "eval": EVAL | EVAL_MODEL | Needs.WEIGHTS, "plan": PLAN | LAYOUTS}
AHEAD = ("--placement.kind=disaggregated", "--placement.max_staleness=1", "--algorithm.correction=tis")
EXPERTS = "--model.path=experts"
TASK = "examples.arithmetic.task:Arithmetic"
TWO_HOSTS = ('--rollout.hosts=["10.0.0.5", "10.0.0.6"]', "--rollout.engines=2")
PPO = "--algorithm.name=ppo"
MEASURED = '--data.train=[{source = "x.jsonl", format = "gsm8k", pass_rate = "measured", pass_rate_high = 0.9}]'
AGENT = "--agent.name=examples.arithmetic.python_agent:solve"
ON_HUB, COMMIT = "hf:someone/unknown", "5" * 40
MTP = "--train.mtp_loss_scaling_factor=0.1"
GLM = ARCHITECTURES["glm4_moe_air"] | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
GLOO = "--sync.transport=gloo"  # works on a GPU and without


class Mistake(NamedTuple):
    rule: Callable[[Facts], None]
    commands: str
    """Those that refuse it, of train, eval and plan."""
    line: str
    """How the line begins; MODEL stands for the field or option that names the model."""
    overrides: tuple[str, ...] = ()
    model: Mapping[str, Any] = MappingProxyType({})
    """Changes to its config.json."""
    ranks: int = 1
    gpus: int = 0
    launchers: str = ""
    checkpoint: str = "model"
    """What eval is to evaluate."""
    scene: Callable[[pytest.MonkeyPatch], object] = lambda patch: None


def keep_no_weights_offline(patch: pytest.MonkeyPatch) -> None:
    """The hub cannot be reached, and its cache has of `ON_HUB` what a plan looks at."""
    cached = Path("cache/models--someone--unknown")
    snapshot = cached / "snapshots" / COMMIT
    shutil.copytree("model", snapshot, ignore=lambda *_: ["model.safetensors"])
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "cache")
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def with_value_head(folder: Path, labels: int) -> None:
    shutil.copytree("model", folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "score.weight": torch.zeros(labels, 256)}, folder / "model.safetensors", metadata={"format": "pt"})


def make_teacher(folder: str, source: str = "experts", **changes: object) -> None:
    """A copy of a model, with changes to its config.json."""
    shutil.copytree(source, folder)
    edit_config(Path(folder), changes)


def swap_tokens(folder: str) -> None:
    """Make a teacher two of whose tokens have each other's ids."""
    make_teacher(folder)
    file = Path(folder) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other, *_ = vocab
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(tokenizer))


def layout(*sizes: str) -> tuple[str, ...]:
    return tuple(f"--train.layout.{size}" for size in sizes)


MISTAKES = [
    Mistake(
        settings.updates_share_the_prompts,
        "train plan",
        "algorithm.updates_per_step = 3: must divide rollout.prompts_per_step (32); change one of them",
        ("--algorithm.updates_per_step=3",),
    ),
    Mistake(
        settings.profiled_steps_are_run,
        "train plan",
        "log.profile_steps = 9: must not be above train.steps (8); name a step that is run",
        ("--log.profile_steps=[2, 9]", "--train.steps=8"),
    ),
    Mistake(
        layouts.profiled_ranks_are_there,
        "train plan",
        "log.profile_ranks = 1: is no rank of train.layout, which has 1; name ranks below 1",
        ("--log.profile_steps=[2]", "--log.profile_ranks=[0, 1]"),
    ),
    Mistake(
        settings.learning_rate_can_fall,
        "train plan",
        "train.min_learning_rate = 2.0: must not be above train.learning_rate (",
        ("--train.min_learning_rate=2", "--train.decay_style=linear"),
    ),
    Mistake(
        settings.constant_learning_rate_does_not_fall,
        "train plan",
        "train.decay_steps = 9: says how the learning rate falls, which train.decay_style keeps constant; set train.decay_style to linear",
        ("--train.decay_steps=9",),
    ),
    Mistake(
        settings.learning_rate_can_fall,
        "train plan",
        "train.warmup_steps = 9: must be below train.decay_steps (9), in which the learning rate has fallen; lower it",
        ("--train.warmup_steps=9", "--train.decay_style=cosine", "--train.decay_steps=9"),
    ),
    Mistake(
        settings.learning_rate_can_fall,
        "train plan",
        "train.wsd_decay_steps = 0: must be from 1 to 9, the optimizer steps after the warm-up; a tenth of the run is common",
        ("--train.steps=9", "--train.decay_style=WSD"),
    ),
    Mistake(
        settings.critic_has_advantages_to_make,
        "train plan",
        "critic: sets up a critic, which algorithm.advantage = 'group_std' has none of; leave the section out, or set algorithm.advantage",
        ("--critic.learning_rate=1e-4",),
    ),
    Mistake(
        settings.critic_leaves_steps_to_the_policy,
        "train plan",
        "critic.critic_warmup = 9: must be below train.steps (9), or no policy is trained; lower it",
        (PPO, "--critic.critic_warmup=9", "--train.steps=9"),
    ),
    Mistake(
        settings.critics_learning_rate_can_fall,
        "train plan",
        "critic.warmup_steps = 9: leaves fewer than 1 of train.decay_steps (9), in which the learning rate falls; lower it",
        (PPO, "--critic.warmup_steps=9", "--train.decay_style=cosine", "--train.decay_steps=9"),
    ),
    Mistake(
        settings.one_way_of_sampling_more_is_chosen,
        "train plan",
        "rollout.over_sampling_prompts = 4: aborts groups before dynamic sampling (algorithm.dynamic_sampling_max_rounds) knows",
        ("--rollout.over_sampling_prompts=4", "--algorithm.dynamic_sampling_max_rounds=2"),
    ),
    Mistake(
        settings.groups_can_be_compared,
        "train plan",
        "rollout.group_size = 1: leaves an answer none to be compared with, as algorithm.advantage = 'group_std' does; raise it, or set",
        ("--rollout.group_size=1",),
    ),
    Mistake(
        settings.groups_can_be_compared,
        "train plan",
        "rollout.group_size = 1: leaves an answer none to be compared with, as dynamic sampling does; raise it, or leave dynamic_sampling",
        (PPO, "--rollout.group_size=1", "--algorithm.dynamic_sampling_max_rounds=2"),
    ),
    Mistake(
        settings.measured_pass_rates_come_before_draws,
        "train plan",
        "algorithm.dynamic_sampling_max_rounds = 2: draws problems while other steps are measured, so data.train with pass_rate = measured",
        (*AHEAD, MEASURED, "--algorithm.dynamic_sampling_max_rounds=2"),
    ),
    Mistake(
        settings.critic_is_of_the_policys_architecture,
        "train plan",
        "critic.path = 'hf:someone/unknown': is on the hub, and only a folder is built for a critic; download it, give its folder",
        (PPO, f"--critic.path={ON_HUB}"),
    ),
    Mistake(
        settings.critic_is_of_the_policys_architecture,
        "train plan",
        "critic.path = 'experts': is a model of another architecture than model.path (family, layers, experts), which is not built; give a",
        (PPO, "--critic.path=experts"),
    ),
    Mistake(
        teacher.teacher_reads_the_policys_tokens,
        "train plan",
        "teacher.path = 'larger': has 500 tokens, the policy 384: it must score the policy's own; give a teacher with the same",
        ("--teacher.path=larger",),
        scene=lambda _: make_teacher("larger", vocab_size=500),
    ),
    Mistake(
        teacher.losses_take_the_teachers_advantages,
        "train plan",
        "algorithm.loss = 'gmpo': has one advantage for a completion, and [teacher] gives one to each token; use ppo, gspo or cispo, or",
        ("--teacher.path=experts", "--algorithm.name=gmpo"),
    ),
    Mistake(
        teacher.teacher_reads_the_policys_tokens,
        "train plan",
        "teacher.path = 'shorter': does not fit this run: rollout.max_new_tokens = 64: with data.max_prompt_tokens (",
        ("--teacher.path=shorter",),
        scene=lambda _: make_teacher("shorter", max_position_embeddings=80),
    ),
    Mistake(
        teacher.trainer_divides_the_teacher,
        "train plan",
        "teacher.path = 'narrow': does not fit this run: model.layers.0.mlp.gate_proj.weight = ",
        ("--teacher.path=narrow", *layout("tp=2")),
        ranks=2,
        scene=lambda _: make_teacher("narrow", "model", intermediate_size=384),
    ),
    Mistake(
        teacher.teacher_has_the_policys_tokenizer,
        "train",
        "teacher.path = 'swapped': has other tokens than the policy: it must score the policy's own; give a teacher with the same",
        ("--teacher.path=swapped",),
        scene=lambda _: swap_tokens("swapped"),
    ),
    Mistake(
        teacher.tensors_are_those_of_the_teacher,
        "train",
        "teacher.path = 'fp8': ",
        ("--teacher.path=fp8",),
    ),
    Mistake(
        teacher.teacher_reads_the_policys_tokens,
        "train plan",
        "teacher.path = 'hf:someone/unknown': is on the hub, and only a folder is loaded; download it, give its folder",
        (f"--teacher.path={ON_HUB}",),
    ),
    Mistake(
        settings.kept_tokens_are_bounded,
        "train plan",
        "rollout.min_p = 0.1: leaves an unbounded number of tokens to draw from, and the trainer is told them all; set rollout.top_k",
        ("--rollout.min_p=0.1",),
    ),
    Mistake(
        settings.kept_tokens_are_bounded,
        "train plan",
        "rollout.top_k = 1: must be from 2, or nothing is left to learn, to 4096, which the trainer is told, or -1; eval.top_k is for",
        ("--rollout.top_k=1",),
    ),
    Mistake(
        settings.several_rewards_are_normalized,
        "train plan",
        "algorithm.multi_objective_aggregation = 'normalize_then_sum': normalizes reward functions apart, of which there is only one",
        ("--algorithm.multi_objective_aggregation=normalize_then_sum",),
    ),
    Mistake(
        settings.calibration_has_quantized_ratios,
        "train plan",
        "algorithm.calibrate_every = 9: calibrates ratios of quantized weights, which precision.mode bf16 has none of in the trainer",
        ("--algorithm.calibrate_every=9", "--algorithm.updates_per_step=2", "--precision.mode=bf16"),
    ),
    Mistake(
        settings.engine_knows_the_format,
        "train eval plan",
        "precision.mode = 'int8_rollout': needs an engine that serves w8a8_int8, this one serves fp8; use another mode",
        ("--precision.mode=int8_rollout",),
        scene=lambda patch: patch.setattr(settings, "SERVED_METHODS", ("fp8",)),
    ),
    Mistake(
        settings.scales_are_those_of_the_format,
        "train eval plan",
        "precision.scale_format = 'fp32': is not what INT8 has, whose scales are e8m0; leave it out",
        ("--precision.mode=int8_rollout", "--precision.scale_format=fp32"),
        scene=lambda patch: patch.setitem(MODES, "int8_rollout", Mode(None, replace(INT8, scale_format="e8m0"))),
    ),
    Mistake(
        settings.backend_computes_in_high,
        "train plan",
        "precision.high = 'fp32': is not what backend deep_gemm computes; use bf16, or precision.backend emulated",
        ("--precision.backend=deep_gemm", "--precision.high=fp32"),
    ),
    Mistake(
        settings.stale_tokens_are_corrected,
        "train plan",
        "placement.max_staleness = 1: trains on tokens of older versions, and nothing corrects for that; set algorithm.correction",
        AHEAD[:2],
    ),
    Mistake(
        settings.replayed_groups_are_corrected,
        "train plan",
        "replay: trains on tokens of older versions, and nothing corrects for that; set algorithm.correction",
        ("--replay.prompts_per_step=8",),
    ),
    Mistake(
        settings.replayed_groups_are_older_than_sampled_ones,
        "train plan",
        "replay.max_staleness = 1: must be above placement.max_staleness (1): when a group comes back it is older",
        (*AHEAD, "--replay.prompts_per_step=8", "--replay.max_staleness=1"),
    ),
    Mistake(
        settings.replayed_groups_keep_their_advantages,
        "train plan",
        "algorithm.advantage = 'gae': makes advantages of the present policy's log-probs or values, and [replay] keeps",
        (PPO, "--algorithm.correction=tis", "--replay.prompts_per_step=8"),
    ),
    Mistake(
        settings.attributed_tokens_are_of_one_version,
        "train plan",
        "log.attribute_every = 2: tells causes apart for tokens of the trainer's own version only; set it to 0, or leave out [replay]",
        ("--algorithm.correction=tis", "--replay.prompts_per_step=8", "--log.attribute_every=2"),
    ),
    Mistake(
        settings.replayed_routing_is_of_one_version,
        "train plan",
        "algorithm.routing_replay = 'engine': replays one routing per token, and a completion that goes on over a switch",
        (*AHEAD, "--algorithm.routing_replay=engine", "--sync.running=continue"),
    ),
    Mistake(
        settings.attributed_tokens_are_of_one_version,
        "train plan",
        "log.attribute_every = 2: tells causes apart for tokens of the trainer's own version only; set it to 0",
        (*AHEAD, "--log.attribute_every=2"),
    ),
    Mistake(
        settings.waits_are_no_hangs,
        "train plan",
        "log.stuck_after = 700.0: must be longer than rollout.request_timeout (900); raise it, lower rollout.request_timeout",
        ("--log.stuck_after=700", "--rollout.request_timeout=900"),
    ),
    Mistake(
        settings.adapters_are_built_for_the_run,
        "train plan",
        "lora: is not built for a run with a critic",
        (
            "--lora.rank=16",
            "--algorithm.name=ppo",
        ),
    ),
    Mistake(
        settings.adapters_are_built_for_the_run,
        "train plan",
        "log.attribute_every = 2: computes with masters, which weights that [lora] freezes",
        (
            "--lora.rank=16",
            "--log.attribute_every=2",
        ),
    ),
    Mistake(
        settings.adapters_are_built_for_the_run,
        "train plan",
        "sync.delta = 'on': has nothing to add to [lora]",
        (
            "--lora.rank=16",
            "--sync.delta=on",
        ),
    ),
    Mistake(
        settings.agents_have_the_conversation_to_themselves,
        "train eval plan",
        "agent: and [environment] both answer the policy; leave one of them out",
        (AGENT, "--environment.name=examples.arithmetic.calculator:Calculator"),
    ),
    Mistake(
        settings.agents_have_the_conversation_to_themselves,
        "train eval plan",
        "data.chat = True: puts a chat template around the question, which the endpoint does with an agent's messages; set it to false",
        (AGENT, "--data.chat=true"),
    ),
    Mistake(
        settings.agents_have_the_conversation_to_themselves,
        "train eval plan",
        "agent.own_reward = True: leaves reward functions nothing to judge, and [reward] names some; leave out one of them",
        (AGENT, "--agent.own_reward=true", "--reward.function=math"),
    ),
    Mistake(
        settings.episodes_have_one_advantage,
        "train plan",
        "algorithm.advantage = 'gae': makes advantages of samples, of which an agent's episode may have several; use an advantage of",
        (AGENT, PPO),
    ),
    Mistake(
        layouts.longest_sequence_fits,
        "train eval plan",
        "agent.max_tokens = 4096: exceeds the model's 1024 positions; lower it",
        (AGENT,),
    ),
    Mistake(
        settings.mtp_layers_are_there_to_train,
        "train plan",
        "train.mtp_loss_scaling_factor = 0.1: trains layers for multi-token prediction, of which this qwen3 model has none",
        (MTP,),
    ),
    Mistake(
        settings.mtp_layers_are_there_to_train,
        "train plan",
        "train.mtp_loss_scaling_factor = 0.1: trains layers for multi-token prediction, which is not built for an output layer tied to",
        (MTP,),
        model=GLM | {"tie_word_embeddings": True},
    ),
    Mistake(
        settings.adapters_are_built_for_the_model,
        "train plan",
        "lora.targets = ['linear_fc2']: names layers of experts, which an engine on a GPU computes in one kernel",
        (
            "--lora.rank=16",
            '--lora.targets=["linear_fc2"]',
            "--precision.backend=deep_gemm",
            "--precision.high=bf16",
            "--model.path=experts",
        ),
    ),
    Mistake(
        settings.adapters_are_built_for_the_model,
        "train plan",
        "lora.targets = ['linear_qkv', 'linear_fc1']: names linear_qkv, of which latent attention has none; set it to ['linear_fc1']",
        ("--lora.rank=16", '--lora.targets=["linear_qkv", "linear_fc1"]'),
        {**PUBLISHED["DeepSeek-V3"], "num_hidden_layers": 4, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    ),
    Mistake(
        layouts.ranks_are_those_of_the_layout,
        "train",
        "train.layout: needs 2 ranks (tp * cp * pp * dp), this launch has 1; start with torchrun --nproc-per-node 2",
        layout("tp=2"),
    ),
    Mistake(
        layouts.nodes_have_as_many_ranks_of_an_engine,
        "train eval plan",
        "rollout.nodes_per_engine = 2: must divide rollout.tp (1); change one of them",
        ("--rollout.nodes_per_engine=2",),
    ),
    Mistake(
        layouts.nodes_have_as_many_engines,
        "train eval",
        "rollout.nodes_per_engine = 2: must divide the number of nodes with engines (1); change it, or give other nodes",
        ("--rollout.nodes_per_engine=2", "--rollout.tp=2"),
    ),
    Mistake(
        layouts.nodes_have_as_many_engines,
        "train eval",
        "rollout.engines = 3: must be a multiple of the nodes with engines (2), for each runs as many; use 4, or other nodes",
        (TWO_HOSTS[0], "--rollout.engines=3"),
    ),
    Mistake(
        layouts.model_is_of_a_known_family,
        "train eval plan",
        "config.json model_type = 'mamba': is no model family known here; use one of ",
        model={"model_type": "mamba"},
    ),
    Mistake(
        layouts.longest_sequence_fits,
        "train eval plan",
        "rollout.max_new_tokens = 1000: with data.max_prompt_tokens (512) exceeds the model's 1024 positions; lower one of them",
        ("--rollout.max_new_tokens=1000",),
    ),
    Mistake(
        layouts.settings_of_experts_have_experts,
        "train plan",
        "train.router_aux_loss = 0.1: needs a model with experts, qwen3 has none; leave it out",
        ("--train.router_aux_loss=0.1",),
    ),
    Mistake(
        layouts.settings_of_experts_have_experts,
        "train plan",
        "train.router_bias_rate = 0.1: needs routers with a correction bias, qwen3_moe has none; use train.router_aux_loss",
        (EXPERTS, "--train.router_bias_rate=0.1"),
    ),
    Mistake(
        layouts.megatron_builds_the_model,
        "train plan",
        "train.layout.tp = 5: must divide vocab_size (384); use a divisor of it",
        layout("tp=5"),
        ranks=5,
    ),
    Mistake(
        layouts.megatron_builds_the_model,
        "train plan",
        "train.layout.cp = 2: tp * cp = 2 * 2 must divide num_attention_heads (2); use a smaller one",
        layout("tp=2", "cp=2"),
        ranks=4,
    ),
    Mistake(
        layouts.megatron_builds_the_model,
        "train plan",
        "train.layout.sequence_parallel = False: is what Megatron's experts need where tp is 2; leave it out",
        (EXPERTS, *layout("tp=2", "sequence_parallel=false")),
        ranks=2,
    ),
    Mistake(
        layouts.megatron_builds_the_model,
        "train plan",
        "train.layout.etp = 1: needs a model with experts, qwen3 has none; leave it out",
        layout("tp=2", "etp=1"),
        ranks=2,
    ),
    Mistake(
        layouts.ranks_hold_whole_leaves,
        "train plan",
        "rollout.tp = 2: with precision.reduction = 'tree' must be a power of two that cuts self_attn.o_proj (128 numbers) into "
        "multiples of 128; use another, wider matrices (export --align 128), or precision.reduction = 'fast'",
        ("--rollout.tp=2", "--precision.mode=bf16"),
        {"num_attention_heads": 2, "head_dim": 64},
    ),
    Mistake(
        layouts.ranks_hold_whole_leaves,
        "train plan",
        "rollout.tp / rollout.ep = 2: with precision.reduction = 'tree' must be a power of two that cuts mlp.experts.*.down_proj "
        "(192 numbers) into multiples of 128; ",
        (EXPERTS, "--rollout.tp=2", "--precision.mode=bf16"),
        scene=lambda _: edit_config(Path("experts"), {"moe_intermediate_size": 192}),
    ),
    Mistake(
        layouts.experts_on_gpus_are_not_summed_by_the_tree,
        "train plan",
        "precision.reduction = 'tree': is not built for experts on a GPU: SGLang's kernels for them add up in an order of their own; "
        "use fast",
        (EXPERTS, GLOO, "--precision.mode=bf16"),
        gpus=1,
    ),
    Mistake(
        layouts.trainer_divides_the_model,
        "train plan",
        "model.layers.0.mlp.gate_proj.weight = 'rows 0..192, columns 0..256': a shard boundary cuts a 128x128 FP8 block in "
        "decoder.layers.0.mlp.linear_fc1.weight, at its row 0; train layouts that work: tp=1; use a smaller",
        layout("tp=2"),
        {"intermediate_size": 384},
        ranks=2,
    ),
    Mistake(
        layouts.engine_divides_the_model,
        "train eval plan",
        "rollout.tp = 3: must divide num_attention_heads (2); rollout layouts that work: tp=2 or tp=1; use a divisor of 2",
        ("--rollout.tp=3",),
    ),
    Mistake(
        layouts.engine_serves_the_model_in_this_precision,
        "train eval plan",
        "precision.mode = 'int8_rollout': is not built for latent attention (MLA)",
        ("--precision.mode=int8_rollout",),
        {**PUBLISHED["DeepSeek-V3"], "num_hidden_layers": 4, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    ),
    Mistake(
        layouts.keys_and_values_can_have_a_scale_each,
        "train eval plan",
        "precision.kv = 'e4m3_per_layer': is not built for latent attention (MLA): its cache holds neither",
        ("--precision.kv=e4m3_per_layer",),
        {**PUBLISHED["DeepSeek-V3"], "num_hidden_layers": 4, "n_routed_experts": 8, "n_group": 1, "topk_group": 1},
    ),
    Mistake(
        layouts.backend_gets_whole_blocks,
        "train plan",
        "precision.backend = 'deep_gemm': needs widths in multiples of 128, and decoder.layers.0.self_attention.linear_qkv.weight is "
        "[768, 192] on rank 0; use emulated, or another train.layout.tp",
        ("--precision.backend=deep_gemm",),
        {"hidden_size": 192},
    ),
    Mistake(
        layouts.rows_fit_into_a_chunk,
        "train",
        "sync.bucket_mb: one row of model.embed_tokens.weight is 524544 bytes, a chunk holds 524288; raise it",
        ("--sync.bucket_mb=1",),
        {"hidden_size": 262272},
    ),
    Mistake(
        machine.backend_runs_here,
        "train",
        "precision.backend = 'deep_gemm': cannot run here: ",
        ("--precision.backend=deep_gemm",),
    ),
    Mistake(
        machine.backend_runs_here,
        "train",
        "precision.backend = 'emulated': cannot run here: it has no FP8 products; name another; or use emulated",
        scene=lambda patch: patch.setattr(requirements, "PRODUCTS", {}),
    ),
    Mistake(
        machine.transport_works_here,
        "train",
        "sync.transport = 'cuda_ipc': needs CUDA, and this machine has no CUDA device; use shared_memory",
        ("--sync.transport=cuda_ipc",),
    ),
    Mistake(
        machine.engine_fits_on_a_node,
        "train eval plan",
        "rollout.tp = 2: is more than 1 GPUs of a node * rollout.nodes_per_engine = 1; lower it, or raise rollout.nodes_per_engine",
        ("--rollout.tp=2", GLOO),
        gpus=1,
    ),
    Mistake(
        machine.engine_fits_on_a_node,
        "train eval plan",
        "rollout.tp = 2: leaves some of 2 GPUs of a node * rollout.nodes_per_engine = 4 unused; raise it, or lower",
        ("--rollout.tp=2", "--rollout.nodes_per_engine=2", '--rollout.hosts=["10.0.0.5", "10.0.0.6"]', GLOO),
        gpus=2,
    ),
    Mistake(
        machine.engine_has_a_scale_for_each_token_and_head,
        "train eval plan",
        "precision.kv = 'e4m3': is built for CPUs only: SGLang's kernels on a GPU read no scale for each token and head; use e4m3_per",
        ("--precision.kv=e4m3", GLOO),
        gpus=1,
    ),
    Mistake(
        machine.engines_fit_on_their_nodes,
        "train eval",
        "rollout.engines = 2: needs 2 * 1 GPUs of a machine (rollout.engines * rollout.tp), this one has 1; lower one of them",
        ("--rollout.engines=2", GLOO),
        gpus=1,
    ),
    Mistake(
        machine.engine_takes_its_options,
        "train eval",
        "rollout.engine = 'vllm': is not registered; known engines: sglang; install the project",
        ("--rollout.engine=vllm",),
    ),
    Mistake(
        machine.engine_takes_its_options,
        "train eval",
        "rollout.sglang.quantization = 'fp8': is what precision.mode says; set precision.mode",
        ("--rollout.sglang.quantization=fp8",),
    ),
    Mistake(
        machine.nodes_have_launchers_of_their_own,
        "train eval",
        f"rollout.hosts = ['10.0.0.5', '10.0.0.6']: names 2 nodes, {LAUNCHER_VARIABLE} has words for 1 of them; start with launch/slurm",
        TWO_HOSTS,
    ),
    Mistake(
        machine.nodes_have_launchers_of_their_own,
        "train eval",
        f"{LAUNCHER_VARIABLE}: starts the engines of two nodes by 'srun a', on the same devices; give it a line of its own for each",
        TWO_HOSTS,
        launchers="srun a\nsrun a",
    ),
    Mistake(
        machine.nodes_of_an_engine_reach_its_first,
        "train eval",
        "sync.host = '127.0.0.1': is this machine alone, and an engine's ranks on 2 nodes are to meet there; give the address by which",
        ('--rollout.hosts=["127.0.0.1", "10.0.0.6"]', "--rollout.nodes_per_engine=2", "--rollout.tp=2"),
        launchers="\nsrun b",
    ),
    Mistake(
        machine.transport_reaches_the_engines,
        "train",
        f"sync.transport = 'shared_memory': needs trainer and engines on one host; {LAUNCHER_VARIABLE} starts engines on others; use",
        TWO_HOSTS,
        launchers="srun a\nsrun b",
    ),
    Mistake(
        machine.engine_can_release_its_memory,
        "train eval",
        "PYTORCH_CUDA_ALLOC_CONF = 'expandable_segments:True': keeps a colocated engine from releasing its memory: torch_memory_saver",
        (GLOO,),
        gpus=1,
        scene=lambda patch: patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    ),
    Mistake(
        files.environment_can_be_loaded,
        "train eval",
        "environment.name = 'json:nothing': cannot be imported (AttributeError",
        ("--environment.name=json:nothing", "--environment.max_tokens=8"),
    ),
    Mistake(
        files.agent_can_be_loaded,
        "train eval",
        "agent.name = 'json:nothing': cannot be imported (AttributeError",
        ("--agent.name=json:nothing", "--agent.max_tokens=512"),
    ),
    Mistake(
        files.agent_can_be_loaded,
        "train eval",
        "agent.command = 'no-such-program': is no program that can be run here; give its path, or add it to PATH",
        ('--agent.command=["no-such-program"]', "--agent.max_tokens=512"),
    ),
    Mistake(
        files.agents_can_chat,
        "train",
        "agent: needs a chat template, and the tokenizer of",
        (AGENT, "--agent.max_tokens=512"),
    ),
    Mistake(
        files.loss_and_advantage_can_be_computed,
        "train",
        "algorithm.loss = 'ppo': failed on a toy batch (TypeError",
        ("--algorithm.loss_settings.tau=2.0",),
    ),
    Mistake(
        files.tensors_are_those_of_the_model,
        "train eval",
        "MODEL = 'model': tensor model.layers.0.mlp.gate_proj.weight has shape [512, 256], config.json says [640, 256]",
        model={"intermediate_size": 640},
    ),
    Mistake(
        files.mtp_layers_that_are_trained_are_whole,
        "train",
        "MODEL = 'glm': tensor model.layers.1.enorm.weight is missing; the checkpoint is incomplete, or config.json is another model's",
        (MTP, "--model.path=glm"),
        scene=lambda _: make_byte_tokenizer(make_model(Path("glm"), GLM)),
    ),
    Mistake(
        files.tensors_are_those_of_the_critic,
        "train",
        "critic.path = 'values': tensor score.weight has shape [2, 256], config.json says [1, 256]; correct config.json",
        (PPO, "--critic.path=values"),
        scene=lambda _: with_value_head(Path("values"), labels=2),
    ),
    Mistake(
        files.scales_are_those_of_the_contract,
        "train",
        "MODEL = 'fp8': tensor model.layers.0.self_attn.q_proj.weight_scale_inv holds scales that are no powers of two",
        ("--model.path=fp8",),
    ),
    Mistake(
        files.tokenizer_can_be_loaded,
        "train",
        "model.path = 'bare': holds no usable tokenizer (",
        ("--model.path=bare",),
        scene=lambda patch: shutil.copytree("model", "bare", ignore=lambda *_: ["tokenizer.json"]),
    ),
    Mistake(files.problems_can_be_read, "train", "data.train = 'no.jsonl': does not exist; ", ("--data.train=no.jsonl",)),
    Mistake(
        files.problems_can_be_read,
        "train",
        "data.train = 'rows.jsonl:1': has no field prompt, found question, answer; set data.columns.question to one of them",
        ("--data.train=rows.jsonl", '--data.columns={question = "prompt", answer = "answer"}'),
        scene=lambda patch: Path("rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n'),
    ),
    Mistake(
        files.problems_can_be_read,
        "train",
        "data.chat: the tokenizer of model has no chat template; set it to false, or add chat_template.jinja to that folder",
        ("--data.chat=true",),
    ),
    Mistake(
        files.weights_can_be_had,
        "train eval",
        f"MODEL = '{ON_HUB}@{COMMIT}': HF_HUB_OFFLINE is set, and cache has no model.safetensors of it; unset it, or run `hf download",
        (f"--model.path={ON_HUB}",),
        checkpoint=ON_HUB,
        scene=keep_no_weights_offline,
    ),
    Mistake(
        files.rewards_can_be_computed,
        "train eval",
        "reward.function = 'json:nothing': a reward worker with 4096 MiB could not load its functions: cannot be imported (AttributeError",
        ("--reward.function=json:nothing",),
    ),
    Mistake(
        files.trackers_can_be_loaded,
        "train",
        "log.trackers = 'json:nothing': cannot be imported (AttributeError",
        ('--log.trackers=["json:nothing"]',),
    ),
    Mistake(
        resumed_run.resumed_run_had_these_settings,
        "train",
        "checkpoint.resume = 'model': holds no checkpoints/step_NNNNN; give the folder of a run that wrote a checkpoint, or set it to auto",
        ("--checkpoint.resume=model",),
    ),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with three checkpoints: a dense one, one with experts, one in FP8 with scales that are no powers of two."""
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "model", num_hidden_layers=2)
    make_checkpoint(folder / "experts", num_experts=4)
    with_random_blocks(make_checkpoint(folder / "fp8"), "fp32", 1)
    return folder


@pytest.fixture
def workplace(models, tmp_path, monkeypatch) -> Path:
    """A folder with good checkpoints and a good run.toml, and no launcher's environment; no engine starts."""
    for model in models.iterdir():
        (tmp_path / model.name).mkdir()
        for file in model.iterdir():
            (tmp_path / model.name / file.name).symlink_to(file)
        (tmp_path / model.name / "config.json").unlink()
        shutil.copy(model / "config.json", tmp_path / model.name)
    data = f'[data]\ntrain = "{TASK}"\neval = "{TASK}"\n'
    (tmp_path / "run.toml").write_text(f'[model]\npath = "model"\n[train.layout]\ntp = 1\n[rollout]\nmax_new_tokens = 64\n{data}')
    monkeypatch.chdir(tmp_path)
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", LAUNCHER_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(evaluate, "start_engines", None)
    return tmp_path


def set_scene(mistake: Mistake, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake.model:
        edit_config(workplace / "model", mistake.model)
    mistake.scene(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", str(mistake.ranks))
    monkeypatch.setenv(LAUNCHER_VARIABLE, mistake.launchers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: mistake.gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: mistake.gpus)


def refused(command: str, mistake: Mistake) -> str:
    """The line that the command prints; checks that it is one, and exit code 2."""
    options = {"eval": ["--checkpoint", mistake.checkpoint], "plan": ["--top", "1", "--gpus-per-node", str(mistake.gpus or 8)]}
    result = CliRunner().invoke(app, [command, "run.toml", *options.get(command, []), *mistake.overrides])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("megatron-rl: ") and result.stderr.count("\n") == 1
    return result.stderr.removeprefix("megatron-rl: ").rstrip()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.rule.__name__)
def test_all_commands_refuse_the_same_mistake_with_the_same_line(mistake, workplace, monkeypatch):
    set_scene(mistake, workplace, monkeypatch)
    needs = next(rule.needs for rule in RULES if rule.check is mistake.rule)
    assert mistake.commands.split() == [command for command, known in COMMANDS.items() if needs in known]
    for command in mistake.commands.split():
        line = mistake.line.replace("MODEL", "--checkpoint" if command == "eval" else "model.path")
        assert refused(command, mistake).startswith(line), command


def find_lines(raised: BaseException) -> set[tuple[str, int]]:
    """File and line of every frame that an error has passed."""
    return {(Path(frame.f_code.co_filename).name, line) for frame, line in traceback.walk_tb(raised.__traceback__)}


def test_no_rule_and_no_refusal_is_dead(workplace):
    broken, passed = set(), set()
    for mistake in MISTAKES:
        with pytest.MonkeyPatch.context() as scene:
            set_scene(mistake._replace(model={}), workplace, scene)
            config = load_config(workplace / "run.toml", mistake.overrides)
            hf_config = {**read_config(config.model.folder), **mistake.model}
            rule, error = next(find_mistakes(Facts.here(config, hf_config=hf_config, path=config.model.path), TRAIN))
        assert rule.check is mistake.rule
        broken.add(rule.check)
        passed |= find_lines(error)
    assert broken == {rule.check for rule in RULES}
    for module in (settings, layouts, machine, files, teacher):
        path = Path(module.__file__)
        refusals = {(path.name, node.lineno) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)}
        assert refusals <= passed, refusals - passed


def test_of_several_ranks_only_rank_0_reads_files(workplace, monkeypatch):
    mistake = load_config(workplace / "run.toml", ["--data.train=no.jsonl", "--train.layout.dp=2"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_run(mistake).world_size == 2
    with pytest.raises(UserError, match="data.train = 'no.jsonl': does not exist"):
        check_on_rank_0(mistake)
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_on_rank_0(mistake)  # `check_run` has done it
