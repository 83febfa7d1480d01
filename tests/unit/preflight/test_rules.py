"""Each preflight check fails for some mistake, and all commands that have what the check needs refuse it with the same line."""

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
from support.families import ARCHITECTURES, YARN
from support.fp8_checkpoints import with_random_blocks
from support.geometries import PUBLISHED
from support.models import edit_config, make_checkpoint, make_model
from typer.testing import CliRunner

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.cli import evaluate
from megatron_rl.cli.main import app
from megatron_rl.config import load_config
from megatron_rl.cost.hardware import GPUS
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.kernels.linear import requirements
from megatron_rl.preflight import files, layouts, machine, rank_sums, resumed_run, settings, teacher
from megatron_rl.preflight.rule import (
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
    find_mistakes,
)
from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE
from parallel.formats import INT8, MODES, Mode

COMMANDS = {"train": TRAIN, "eval": EVAL | EVAL_MODEL | Needs.WEIGHTS, "plan": PLAN | LAYOUTS}
AHEAD = ("--placement.kind=disaggregated", "--placement.max_staleness=1", "--algorithm.correction=tis")
EXPERTS = "--model.path=experts"
TASK = "examples.arithmetic.task:Arithmetic"
TWO_HOSTS = ('--rollout.hosts=["10.0.0.5", "10.0.0.6"]', "--rollout.engines=2")
PPO = "--algorithm.name=ppo"
MEASURED = '--data.train=[{source = "x.jsonl", format = "gsm8k", pass_rate = "measured", pass_rate_high = 0.9}]'
AGENT = "--agent.name=examples.arithmetic.tool_agent:solve"
ON_HUB, COMMIT = "hf:someone/unknown", "5" * 40
MTP = "--train.mtp_loss_scaling_factor=0.1"
GLM = ARCHITECTURES["glm4_moe_air"] | {"num_hidden_layers": 1, "num_nextn_predict_layers": 1}
MLA = {**PUBLISHED["DeepSeek-V3"], "num_hidden_layers": 4, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "head_dim": 64}
SPARSE = ARCHITECTURES["glm_moe_dsa"] | {"head_dim": 64, "max_position_embeddings": 1024}
SINKS = ARCHITECTURES["gpt_oss"] | {"max_position_embeddings": 4096}
HIGH = "--precision.mode=bf16"
GLOO = "--sync.transport=gloo"  # works with and without a GPU
KIND = "--placement.kind=disaggregated"  # needs no library that releases memory
TRITON = "--rollout.sglang.attention_backend=triton"
FA3, FLASHINFER = (f"--rollout.sglang.attention_backend={name}" for name in ("fa3", "flashinfer"))


RANKS = "--precision.reduction=ranks"
BLOCKS = "--precision.backend=deep_gemm"
RANK_SETTINGS = [
    ("precision.mode = 'fp8_rollout': quantizes the engine alone, but precision.reduction = 'ranks'", "--precision.mode=fp8_rollout"),
    ("precision.mode = 'int8_rollout': quantizes the engine alone", "--precision.mode=int8_rollout"),
    ("precision.scale_format = 'fp32': is applied in another order by each kernel", "--precision.scale_format=fp32"),
    ("lora.rank = 8: adds products of adapters", "--lora.rank=8"),
]
GRAPHS = "--rollout.sglang.cuda_graph_backend_prefill"
WIDE_HEADS = {"model": {"head_dim": 128}}
OTHER_SUMS = ("disable_custom_all_reduce", "enable_mscclpp", "enable_nccl_nvls", "enable_symm_mem", "enable_torch_symm_mem")
RANK_GPUS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("precision.reduction = 'ranks': needs Hopper GPUs", (BLOCKS,), {"capability": (10, 0)}),
    ("precision.kv = 'e4m3_per_layer': rounds queries and probabilities", (BLOCKS, "--precision.kv=e4m3_per_layer"), {}),
    ("precision.high = 'fp32': is not the dtype of the attention kernels", (HIGH, "--precision.high=fp32"), {}),
    ("precision.backend = 'emulated': is another library than the engine's DeepGEMM", (), {}),
    (
        "config.json head_dim = 32: is not a known width of attention: 128 with FlashAttention 3, 64, 128,",
        (HIGH,),
        {"model": {"head_dim": 32}},
    ),
    ("config.json head_dim = 64: is not a known width", (HIGH, FA3), {"model": {"head_dim": 64}}),
    (
        "rollout.nodes_per_engine = 2: adds over nodes by NCCL",
        (HIGH, "--rollout.tp=4", "--rollout.nodes_per_engine=2", '--rollout.hosts=["10.0.0.5", "10.0.0.6"]'),
        {"model": {"num_attention_heads": 4, "num_key_value_heads": 4}},
    ),
    ("rollout.sglang.attention_backend = 'flashinfer': is a kernel that the trainer does not have", (HIGH, FLASHINFER), {}),
    ("rollout.sglang.cuda_graph_backend_prefill = 'full': may capture the attention of prompts", (HIGH, f"{GRAPHS}=full"), WIDE_HEADS),
    ("rollout.sglang.cuda_graph_backend_prefill = 'breakable': may capture the", (HIGH, TRITON, f"{GRAPHS}=breakable"), WIDE_HEADS),
    (
        "rollout.sglang.cuda_graph_config = {'decode': {'max_bs': 8}}: may capture",
        (HIGH, "--rollout.sglang.cuda_graph_config={decode = {max_bs = 8}}"),
        {},
    ),
    *(
        (f"rollout.sglang.{name} = True: adds over ranks by other kernels or NVLink multicast", (HIGH, f"--rollout.sglang.{name}=true"), {})
        for name in OTHER_SUMS
    ),
]


class Mistake(NamedTuple):
    line: str
    """Start of the error line. MODEL stands for the field or option that names the model."""
    rule: Callable[[Facts], None]
    commands: str
    """Commands that refuse the mistake: train, eval, plan."""
    overrides: tuple[str, ...] = ()
    model: Mapping[str, Any] = MappingProxyType({})
    """Changes to the model's config.json."""
    ranks: int = 1
    gpus: int = 0
    capability: tuple[int, int] = (9, 0)
    """CUDA compute capability of the GPUs."""
    launchers: str = ""
    checkpoint: str = "model"
    """The checkpoint that `eval` evaluates."""
    scene: Callable[[pytest.MonkeyPatch], object] = lambda patch: None


def refuse(line: str, rule: Callable[[Facts], None], commands: str, *overrides: str, **fields: Any) -> Mistake:
    return Mistake(line, rule, commands, overrides, **fields)


def keep_no_weights_offline(patch: pytest.MonkeyPatch) -> None:
    """Make the hub unreachable, with only the small files of `ON_HUB` in the cache."""
    cached = Path("cache/models--someone--unknown")
    snapshot = cached / "snapshots" / COMMIT
    shutil.copytree("model", snapshot, ignore=lambda *_: ["model.safetensors"])
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "cache")
    patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def use_old_torch(patch: pytest.MonkeyPatch) -> None:
    """Replace `varlen_attn` by one with the parameters of an older torch."""
    patch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=(): None)
    patch.setattr("torch.__version__", "2.10.0")


def use_hopper(patch: pytest.MonkeyPatch, *packages: str) -> None:
    """Report Hopper GPUs, and leave only these packages, which are empty."""
    shutil.rmtree("site", ignore_errors=True)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for package in packages:
        (Path("site") / package).mkdir(parents=True)
        (Path("site") / package / "__init__.py").touch()
    patch.syspath_prepend("site")


def with_value_head(folder: Path, labels: int) -> None:
    shutil.copytree("model", folder)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, "score.weight": torch.zeros(labels, 256)}, folder / "model.safetensors", metadata={"format": "pt"})


def make_teacher(folder: str, source: str = "experts", **changes: object) -> None:
    """Copy a model and change its config.json."""
    shutil.copytree(source, folder)
    edit_config(Path(folder), changes)


def swap_tokens(folder: str) -> None:
    """Make a teacher that swaps the ids of two tokens."""
    make_teacher(folder)
    file = Path(folder) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    one, other, *_ = vocab
    vocab[one], vocab[other] = vocab[other], vocab[one]
    file.write_text(json.dumps(tokenizer))


def layout(*sizes: str) -> tuple[str, ...]:
    return tuple(f"--train.layout.{size}" for size in sizes)


# fmt: off
MISTAKES = [
    refuse("algorithm.updates_per_step = 3: must divide rollout.prompts_per_step (32); change one of them",
           settings.updates_divide_the_prompts, "train plan", "--algorithm.updates_per_step=3"),
    refuse("log.profile_steps = 9: must not exceed train.steps (8); use steps of the run",
           settings.profiled_steps_exist, "train plan", "--log.profile_steps=[2, 9]", "--train.steps=8"),
    refuse("log.profile_ranks = 1: must be less than the number of ranks in train.layout (1); lower it",
           layouts.profiled_ranks_exist, "train plan", "--log.profile_steps=[2]", "--log.profile_ranks=[0, 1]"),
    refuse("train.min_learning_rate = 2.0: must not exceed train.learning_rate (1e-06); lower it",
           settings.learning_rate_schedule_is_valid, "train plan", "--train.min_learning_rate=2", "--train.decay_style=linear"),
    refuse("train.decay_steps = 9: describes a decay of the learning rate, but train.decay_style is constant; set train.decay_style to",
           settings.learning_rate_schedule_is_valid, "train plan", "--train.decay_steps=9"),
    refuse("train.warmup_steps = 9: must be less than train.decay_steps (9), at which the decay ends; lower it",
           settings.learning_rate_schedule_is_valid, "train plan", "--train.warmup_steps=9", "--train.decay_style=cosine",
           "--train.decay_steps=9"),
    refuse("train.wsd_decay_steps = 0: must be from 1 to 9, the number of optimizer steps after the warm-up; a tenth of the run is",
           settings.learning_rate_schedule_is_valid, "train plan", "--train.steps=9", "--train.decay_style=WSD"),
    refuse("critic: configures a critic, but algorithm.advantage = 'group_std' does not use one; leave the section out, or set",
           settings.critic_settings_are_valid, "train plan", "--critic.learning_rate=1e-4"),
    refuse("critic.critic_warmup = 9: must be less than train.steps (9), or the policy is never trained; lower it",
           settings.critic_settings_are_valid, "train plan", PPO, "--critic.critic_warmup=9", "--train.steps=9"),
    refuse("critic.warmup_steps = 9: leaves less than 1 of train.decay_steps (9) for the decay of the learning rate; lower it",
           settings.critic_settings_are_valid, "train plan", PPO, "--critic.warmup_steps=9", "--train.decay_style=cosine",
           "--train.decay_steps=9"),
    refuse("rollout.over_sampling_prompts = 4: aborts groups before dynamic sampling (algorithm.dynamic_sampling_max_rounds) can judge",
           settings.oversampling_excludes_dynamic_sampling, "train plan", "--rollout.over_sampling_prompts=4",
           "--algorithm.dynamic_sampling_max_rounds=2"),
    refuse("rollout.group_size = 1: is too small, because algorithm.advantage = 'group_std' compares the completions of a group; raise",
           settings.groups_have_several_members, "train plan", "--rollout.group_size=1"),
    refuse("rollout.group_size = 1: is too small, because dynamic sampling compares the completions of a group; raise it, or set",
           settings.groups_have_several_members, "train plan", PPO, "--rollout.group_size=1",
           "--algorithm.dynamic_sampling_max_rounds=2"),
    refuse("algorithm.dynamic_sampling_max_rounds = 2: draws problems while pass rates change, so a resumed run with pass_rate =",
           settings.measured_pass_rates_resume_exactly, "train plan", *AHEAD, MEASURED, "--algorithm.dynamic_sampling_max_rounds=2"),
    refuse("critic.path = 'hf:someone/unknown': is on the hub, but a critic can only be loaded from a local folder; download it and",
           settings.critic_has_the_policys_architecture, "train plan", PPO, f"--critic.path={ON_HUB}"),
    refuse("critic.path = 'experts': must have the same architecture as model.path, but these differ: family, attention, experts; give",
           settings.critic_has_the_policys_architecture, "train plan", PPO, "--critic.path=experts"),
    refuse("teacher.path = 'larger': must score the policy's tokens, but its vocabulary has 500 tokens and the policy's 384; give a",
           teacher.teacher_fits_the_policys_sequences, "train plan", "--teacher.path=larger",
           scene=lambda _: make_teacher("larger", vocab_size=500)),
    refuse("algorithm.loss = 'gmpo': needs one advantage per completion, but [teacher] gives each token its own; use ppo, gspo or",
           teacher.loss_supports_token_advantages, "train plan", "--teacher.path=experts", "--algorithm.name=gmpo"),
    refuse("teacher.path = 'shorter': does not fit this run: rollout.max_new_tokens = 64: plus data.max_prompt_tokens (512) exceeds",
           teacher.teacher_fits_the_policys_sequences, "train plan", "--teacher.path=shorter",
           scene=lambda _: make_teacher("shorter", max_position_embeddings=80)),
    refuse("teacher.path = 'narrow': does not fit this run: model.layers.0.mlp.gate_proj.weight = rows 0..192, columns 0..256: a shard",
           teacher.trainer_can_shard_the_teacher, "train plan", "--teacher.path=narrow", *layout("tp=2"), ranks=2,
           scene=lambda _: make_teacher("narrow", "model", intermediate_size=384)),
    refuse("teacher.path = 'swapped': must score the policy's tokens, but its vocabulary differs from the policy's; give a teacher",
           teacher.teacher_has_the_policys_tokenizer, "train", "--teacher.path=swapped", scene=lambda _: swap_tokens("swapped")),
    refuse("teacher.path = 'fp8': tensor model.layers.0.self_attn.q_proj.weight_scale_inv holds scales that are not powers of two,",
           teacher.tensors_match_the_teacher, "train", "--teacher.path=fp8"),
    refuse("teacher.path = 'hf:someone/unknown': is on the hub, but a teacher can only be loaded from a local folder; download it and",
           teacher.teacher_fits_the_policys_sequences, "train plan", f"--teacher.path={ON_HUB}"),
    refuse("rollout.min_p = 0.1: leaves an unbounded number of candidate tokens, which the engine must all report to the trainer; set",
           settings.candidate_tokens_are_bounded, "train plan", "--rollout.min_p=0.1"),
    refuse("rollout.top_k = 1: must be from 2 to 4096, or -1: one candidate leaves nothing to learn, and more cannot be reported to",
           settings.candidate_tokens_are_bounded, "train plan", "--rollout.top_k=1"),
    refuse("algorithm.multi_objective_aggregation = 'normalize_then_sum': normalizes reward functions separately, but there is only",
           settings.normalization_needs_several_rewards, "train plan", "--algorithm.multi_objective_aggregation=normalize_then_sum"),
    refuse("algorithm.calibrate_every = 9: calibrates ratios of a quantized trainer, but precision.mode bf16 does not quantize the",
           settings.calibration_needs_a_quantized_trainer, "train plan", "--algorithm.calibrate_every=9",
           "--algorithm.updates_per_step=2", "--precision.mode=bf16"),
    refuse("precision.mode = 'int8_rollout': needs an engine that serves w8a8_int8, but this one serves fp8; use another mode",
           settings.engine_serves_the_format, "train eval plan", "--precision.mode=int8_rollout",
           scene=lambda patch: patch.setattr(settings, "SERVED_METHODS", ("fp8",))),
    refuse("precision.scale_format = 'fp32': does not apply to INT8, whose scales are e8m0; leave it out",
           settings.format_has_the_scales, "train eval plan", "--precision.mode=int8_rollout", "--precision.scale_format=fp32",
           scene=lambda patch: patch.setitem(MODES, "int8_rollout", Mode(None, replace(INT8, scale_format="e8m0")))),
    refuse("precision.high = 'fp32': is not supported by precision.backend deep_gemm; use bf16, or precision.backend emulated",
           settings.backend_supports_high, "train plan", "--precision.backend=deep_gemm", "--precision.high=fp32"),
    refuse("placement.max_staleness = 1: trains on tokens of older policy versions without a correction; set algorithm.correction =",
           settings.off_policy_tokens_are_corrected, "train plan", *AHEAD[:2]),
    refuse('replay: trains on tokens of older policy versions without a correction; set algorithm.correction = "tis", or',
           settings.off_policy_tokens_are_corrected, "train plan", "--replay.prompts_per_step=8"),
    refuse("algorithm.old_logprobs = 'engine': leaves out a pass that the run needs: algorithm.correction weights tokens by the trainer's",
           settings.pass_is_not_needed, "train plan", "--algorithm.old_logprobs=engine", "--algorithm.correction=tis"),
    refuse("replay.max_staleness = 1: must be greater than placement.max_staleness (1), because a replayed group is older than when it",
           settings.replay_settings_are_valid, "train plan", *AHEAD, "--replay.prompts_per_step=8", "--replay.max_staleness=1"),
    refuse("algorithm.advantage = 'gae': computes advantages from the current policy's log-probs or values, but [replay] reuses the",
           settings.replay_settings_are_valid, "train plan", PPO, "--algorithm.correction=tis", "--replay.prompts_per_step=8"),
    refuse("log.attribute_every = 2: can only attribute the mismatch of tokens that the current policy version sampled; set it to 0,",
           settings.attributed_tokens_have_one_version, "train plan", "--algorithm.correction=tis", "--replay.prompts_per_step=8",
           "--log.attribute_every=2"),
    refuse("algorithm.routing_replay = 'engine': replays one routing per token, but with sync.running = \"continue\" several versions",
           settings.replayed_routing_has_one_version, "train plan", *AHEAD, "--algorithm.routing_replay=engine",
           "--sync.running=continue"),
    refuse("log.attribute_every = 2: can only attribute the mismatch of tokens that the current policy version sampled; set it or",
           settings.attributed_tokens_have_one_version, "train plan", *AHEAD, "--log.attribute_every=2"),
    refuse("log.stuck_after = 700.0: must be greater than rollout.request_timeout (900); raise it, lower rollout.request_timeout, "
           "or set it to 0", settings.hang_timeout_exceeds_other_timeouts, "train plan", "--log.stuck_after=700",
           "--rollout.request_timeout=900"),
    refuse("lora: is not supported in a run with a critic; leave it out, or use another algorithm.advantage",
           settings.lora_fits_the_run, "train plan", "--lora.rank=16", "--algorithm.name=ppo"),
    refuse("log.attribute_every = 2: needs FP32 master weights, which the weights frozen by [lora] do not have; set it to 0",
           settings.lora_fits_the_run, "train plan", "--lora.rank=16", "--log.attribute_every=2"),
    refuse("sync.delta = 'on': has no effect with [lora], which only sends adapters; leave it out",
           settings.lora_fits_the_run, "train plan", "--lora.rank=16", "--sync.delta=on"),
    refuse("train.router_bias_rate = 0.001: changes the routers' biases, which [lora] freezes; set it to 0",
           settings.lora_fits_the_run, "train plan", "--lora.rank=16", "--train.router_bias_rate=0.001"),
    refuse("agent: excludes [environment], because both reply to the policy; leave one of them out",
           settings.agent_settings_are_valid, "train eval plan", AGENT, "--environment.name=examples.arithmetic.calculator:Calculator"),
    refuse("data.chat = True: applies a chat template to the question, but the agent's endpoint already applies it to the agent's",
           settings.agent_settings_are_valid, "train eval plan", AGENT, "--data.chat=true"),
    refuse("data.chat_template_kwargs = 'enable_thinking': only applies to a chat template, and neither data.chat nor [agent] uses one",
           settings.chat_template_settings_apply, "train eval plan", "--data.chat_template_kwargs={enable_thinking = false}"),
    refuse("agent.own_reward = True: makes the agent return the reward, but [reward] sets a reward function; leave one of them out",
           settings.agent_settings_are_valid, "train eval plan", AGENT, "--agent.own_reward=true", "--reward.function=math"),
    refuse("algorithm.advantage = 'gae': computes advantages per sample, but an agent's episode may have several samples; use an",
           settings.agent_advantages_depend_on_rewards, "train plan", AGENT, PPO),
    refuse("agent.max_tokens = 4096: exceeds the model's 1024 positions; lower it",
           layouts.longest_sequence_fits, "train eval plan", AGENT),
    refuse("train.mtp_loss_scaling_factor = 0.1: trains multi-token prediction layers, but this qwen3 model has none",
           settings.mtp_layers_can_be_trained, "train plan", MTP),
    refuse("train.mtp_loss_scaling_factor = 0.1: trains multi-token prediction layers, which is not supported if the output layer is",
           settings.mtp_layers_can_be_trained, "train plan", MTP, model=GLM | {"tie_word_embeddings": True}),
    refuse("train.mtp_loss_scaling_factor = 0.1: trains multi-token prediction layers, which is not supported for qwen3_next; leave it out",
           settings.mtp_layers_can_be_trained, "train plan", MTP, model=ARCHITECTURES["qwen3_next"]),
    refuse("lora.targets = ['linear_fc2']: adapts layers of experts, which an engine on a GPU computes in a single kernel without",
           settings.lora_fits_the_model, "train plan", "--lora.rank=16", '--lora.targets=["linear_fc2"]',
           "--precision.backend=deep_gemm", "--precision.high=bf16", "--model.path=experts"),
    refuse("lora.targets = ['linear_qkv', 'linear_fc1']: adapts linear_qkv, which the model's attention does not have; set it",
           settings.lora_fits_the_model, "train plan", "--lora.rank=16", '--lora.targets=["linear_qkv", "linear_fc1"]', model=MLA),
    refuse("train.layout: needs 2 ranks (tp * cp * pp * dp), but this launch has 1; start with torchrun --nproc-per-node 2, or change",
           layouts.launch_has_the_layouts_ranks, "train", *layout("tp=2")),
    refuse("rollout.nodes_per_engine = 2: must divide rollout.tp (1); change one of them",
           layouts.nodes_share_an_engine_evenly, "train eval plan", "--rollout.nodes_per_engine=2"),
    refuse("rollout.nodes_per_engine = 2: must divide the number of nodes with engines (1); change it, or use another number of nodes",
           layouts.nodes_share_the_engines_evenly, "train eval", "--rollout.nodes_per_engine=2", "--rollout.tp=2"),
    refuse("rollout.engines = 3: must be a multiple of the nodes with engines (2), because all run the same number of engines; use 4,",
           layouts.nodes_share_the_engines_evenly, "train eval", TWO_HOSTS[0], "--rollout.engines=3"),
    refuse("config.json model_type = 'mamba': ",
           layouts.model_family_is_known, "train eval plan", model={"model_type": "mamba"}),
    refuse("config.json quantization_config.quant_method = 'modelopt': is not supported, only ",
           layouts.checkpoint_format_is_known, "train eval plan", model={"quantization_config": {"quant_method": "modelopt"}}),
    refuse("rollout.max_new_tokens = 1000: plus data.max_prompt_tokens (512) exceeds the model's 1024 positions; lower one of them",
           layouts.longest_sequence_fits, "train eval plan", "--rollout.max_new_tokens=1000"),
    refuse("rollout.max_new_tokens = 1000: plus data.max_prompt_tokens (512) exceeds the model's 1024 positions; lower one of them, or set"
           " max_position_embeddings of config.json to 1536, as far as YaRN reaches",
           layouts.longest_sequence_fits, "train eval plan", "--rollout.max_new_tokens=1000",
           model={"rope_scaling": YARN | {"factor": 24.0}}),
    refuse("rollout.max_new_tokens = 64: plus data.max_prompt_tokens (512) and environment.max_tokens (500) exceeds the model's 1024",
           layouts.longest_sequence_fits, "train eval plan", "--environment.name=examples.arithmetic.calculator:Calculator",
           "--environment.max_tokens=500"),
    refuse("rollout.max_new_tokens = 64: plus data.max_prompt_tokens (512) exceeds index_topk (384) of config.json, up to which sparse"
           " attention selects every token; lower one of them",
           layouts.longest_sequence_fits, "train eval plan", model=SPARSE),
    refuse("agent.max_tokens = 4096: exceeds index_topk (384) of config.json, up to which sparse attention selects every token; lower it",
           layouts.longest_sequence_fits, "train eval plan", AGENT, model=SPARSE),
    refuse("train.mtp_loss_scaling_factor = 0.1: trains multi-token prediction layers, which is not supported for glm_moe_dsa; leave it",
           settings.mtp_layers_can_be_trained, "train plan", MTP, "--data.max_prompt_tokens=64",
           model=SPARSE | {"num_nextn_predict_layers": 1}),
    refuse("rollout.max_total_tokens = 512: is less than the longest sequence (576 tokens); raise it, or shorten sequences",
           layouts.engines_hold_the_longest_sequence, "train eval plan", "--rollout.max_total_tokens=512"),
    refuse("rollout.sglang.context_length = 575: is less than the longest sequence (576 tokens); raise it, or shorten sequences",
           layouts.engines_hold_the_longest_sequence, "train eval plan", "--rollout.sglang={context_length = 575}"),
    refuse("train.router_aux_loss = 0.1: needs a model with experts, but qwen3 has none; leave it out",
           layouts.expert_settings_have_experts, "train plan", "--train.router_aux_loss=0.1"),
    refuse("train.router_bias_rate = 0.1: needs routers with a correction bias, but qwen3_moe has none; use train.router_aux_loss",
           layouts.expert_settings_have_experts, "train plan", EXPERTS, "--train.router_bias_rate=0.1"),
    refuse("train.layout.tp = 5: must divide vocab_size (384); use a divisor of it",
           layouts.megatron_supports_the_layout, "train plan", *layout("tp=5"), ranks=5),
    refuse("train.layout.cp = 2: tp * cp = 2 * 2 must divide num_attention_heads (2); use a smaller size",
           layouts.megatron_supports_the_layout, "train plan", *layout("tp=2", "cp=2"), ranks=4),
    refuse("train.layout.sequence_parallel = False: is not supported for experts with tp = 2, because Megatron requires sequence",
           layouts.megatron_supports_the_layout, "train plan", EXPERTS, *layout("tp=2", "sequence_parallel=false"), ranks=2),
    refuse("train.layout.etp = 1: needs a model with experts, but qwen3 has none; leave it out",
           layouts.megatron_supports_the_layout, "train plan", *layout("tp=2", "etp=1"), ranks=2),
    refuse("rollout.tp = 2: with precision.reduction = 'tree' must be a power of two that divides self_attn.o_proj (width 128) into",
           layouts.ranks_hold_whole_subtrees, "train plan", "--rollout.tp=2", "--precision.mode=bf16",
           model={"num_attention_heads": 2, "head_dim": 64}),
    refuse("rollout.tp = 2: with precision.reduction = 'tree' must be a power of two that divides linear_attn.out_proj (width 384) into "
           "multiples of 128; use another size, or precision.reduction = 'fast'",
           layouts.ranks_hold_whole_subtrees, "train plan", "--rollout.tp=2", HIGH,
           model=ARCHITECTURES["qwen3_5_text"] | {"linear_num_value_heads": 4, "linear_value_head_dim": 96}),
    refuse("model.layers.0.linear_attn.in_proj_qkvz.weight = '192 rows': of a layer that SGLang merges with others in it: each of 1 engine",
           layouts.engine_can_shard_the_model, "train eval plan",
           model=ARCHITECTURES["qwen3_5_text"] | {"linear_num_key_heads": 3, "linear_num_value_heads": 9, "linear_value_head_dim": 128}),
    refuse("rollout.tp / rollout.ep = 2: with precision.reduction = 'tree' must be a power of two that divides mlp.experts.*.down_proj",
           layouts.ranks_hold_whole_subtrees, "train plan", EXPERTS, "--rollout.tp=2", "--precision.mode=bf16",
           scene=lambda _: edit_config(Path("experts"), {"moe_intermediate_size": 192})),
    refuse("precision.reduction = 'tree': is not supported for experts on a GPU, because SGLang's kernels for experts sum in another "
           "order; use fast",
           layouts.gpu_experts_do_not_use_the_tree, "train plan", EXPERTS, GLOO, "--precision.mode=bf16", gpus=1),
    *(refuse(line, rank_sums.ranks_support_the_settings, "train plan", RANKS, *options) for line, *options in RANK_SETTINGS),
    *(refuse(line, rank_sums.ranks_support_the_gpus, "train plan", RANKS, GLOO, *options, gpus=2, **others)
      for line, options, others in RANK_GPUS),
    refuse("MODEL = 'qwen3_moe': has experts, for which trainer and engine have no common kernels with precision.reduction = 'ranks'; use",
           rank_sums.ranks_support_the_model, "train plan", RANKS, EXPERTS, HIGH),
    refuse("MODEL = 'qwen3_5_text': has attention other than plain softmax (gated delta nets",
           rank_sums.ranks_support_the_model, "train plan", RANKS, model=ARCHITECTURES["qwen3_5_text"]),
    refuse("MODEL = 'deepseek_v3': has experts", rank_sums.ranks_support_the_model, "train plan", RANKS, model=MLA),
    refuse("MODEL = 'gpt_oss': has experts, for", rank_sums.ranks_support_the_model, "train plan", RANKS, HIGH, model=SINKS),
    refuse("rollout.tp = 3: must be a multiple or a divisor of train.layout.tp (2) with precision.reduction = 'ranks'; use another size",
           rank_sums.parts_are_shared_evenly, "train plan", RANKS, HIGH, *layout("tp=2"), "--rollout.tp=3", ranks=2,
           model={"num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 768, "vocab_size": 768}),
    refuse("model.layers.0.mlp.gate_proj.weight = 'rows 0..192, columns 0..256': ",
           layouts.trainer_can_shard_the_model, "train plan", *layout("tp=2"), model={"intermediate_size": 384}, ranks=2),
    refuse("rollout.tp = 3: ",
           layouts.engine_can_shard_the_model, "train eval plan", "--rollout.tp=3"),
    refuse("precision.mode = 'int8_rollout': is not supported for latent attention (MLA), because SGLang absorbs an INT8 kv_b_proj",
           layouts.engine_can_quantize_the_attention, "train eval plan", "--precision.mode=int8_rollout", model=MLA),
    refuse("precision.mode = 'fp8_unified': is not supported for attention with sinks, whose models have no form in FP8; use bf16",
           layouts.engine_can_quantize_the_attention, "train eval plan", "--precision.mode=fp8_unified", model=SINKS),
    refuse("MODEL = 'gpt_oss': is a family whose attention with sinks has no kernel for GPUs yet; use another model, or CPUs",
           layouts.sinks_are_computed_on_a_cpu, "train eval plan", HIGH, "--precision.reduction=fast", GLOO, KIND, TRITON, model=SINKS,
           gpus=2, scene=lambda patch: use_hopper(patch, "sgl_kernel", "flashinfer")),
    refuse("train.layout.etp = 2: is not supported for gpt_oss, because Megatron's experts with biases are not cut over ranks; ",
           layouts.trainer_can_shard_the_model, "train plan", *layout("tp=2"), HIGH, model=SINKS, ranks=2),
    refuse("lora.targets = ['linear_fc2']: adapts layers of experts, which is not supported for gpt_oss; only adapt attention",
           settings.lora_fits_the_model, "train plan", "--lora.rank=16", '--lora.targets=["linear_fc2"]', HIGH, model=SINKS),
    refuse("precision.kv = 'e4m3_per_layer': is not supported for latent attention (MLA): its cache has no keys and values, and",
           layouts.attention_supports_kv_scales_by_layer, "train eval plan", "--precision.kv=e4m3_per_layer", model=MLA),
    refuse("precision.backend = 'deep_gemm': ",
           layouts.backend_gets_whole_blocks, "train plan", "--precision.backend=deep_gemm", model={"hidden_size": 192}),
    refuse("sync.bucket_mb: one row of model.embed_tokens.weight is 524544 bytes, a chunk holds 524288; raise it",
           layouts.rows_fit_into_a_chunk, "train", "--sync.bucket_mb=1", model={"hidden_size": 262272}),
    refuse("precision.backend = 'deep_gemm': cannot run here: torch ",
           machine.backend_runs_here, "train", "--precision.backend=deep_gemm"),
    refuse("precision.backend = 'emulated': cannot run here: ",
           machine.backend_runs_here, "train", scene=lambda patch: patch.setattr(requirements, "PRODUCTS", {})),
    refuse("precision.scale_format = 'fp32': is not supported on Blackwell, whose tensor cores apply only the exponent of a block's scale;",
           machine.scales_suit_blackwell, "train eval plan", "--precision.scale_format=fp32", GLOO, gpus=1, capability=(10, 0)),
    refuse("sync.transport = 'cuda_ipc': ",
           machine.transport_works_here, "train", "--sync.transport=cuda_ipc"),
    refuse("rollout.tp = 2: exceeds 1 GPUs per node * rollout.nodes_per_engine = 1 GPUs; lower it, or raise rollout.nodes_per_engine",
           machine.engine_fits_on_a_node, "train eval plan", "--rollout.tp=2", GLOO, gpus=1),
    refuse("rollout.tp = 2: does not use all of 2 GPUs per node * rollout.nodes_per_engine = 4 GPUs; raise it, or lower",
           machine.engine_fits_on_a_node, "train eval plan", "--rollout.tp=2", "--rollout.nodes_per_engine=2",
           '--rollout.hosts=["10.0.0.5", "10.0.0.6"]', GLOO, gpus=2),
    refuse("precision.kv = 'e4m3': only runs on CPUs, because SGLang's GPU kernels do not read a scale per token and head; use",
           machine.kv_scales_by_token_run_on_a_cpu, "train eval plan", "--precision.kv=e4m3", GLOO, gpus=1),
    refuse("rollout.sglang.cuda_graph_backend_prefill = 'full': captures prompts as CUDA graphs, which is not supported for gated delta",
           layouts.shared_delta_rule_is_in_no_graph, "train plan", "--rollout.sglang.cuda_graph_backend_prefill=full", GLOO, gpus=1,
           model=ARCHITECTURES["qwen3_5_text"]),
    refuse("rollout.engines = 2: needs 2 * 1 GPUs per node (rollout.engines * rollout.tp), but this machine has 1; lower one of them",
           machine.engines_fit_on_their_nodes, "train eval", "--rollout.engines=2", GLOO, gpus=1),
    refuse("rollout.engine = 'vllm': ",
           machine.engine_accepts_its_options, "train eval", "--rollout.engine=vllm"),
    refuse("rollout.sglang.quantization = 'fp8': ",
           machine.engine_accepts_its_options, "train eval", "--rollout.sglang.quantization=fp8"),
    refuse("rollout.hosts = ['10.0.0.5', '10.0.0.6']: names 2 nodes, but MEGATRON_RL_ENGINE_LAUNCHER has launchers for 1; start with",
           machine.nodes_have_separate_launchers, "train eval", *TWO_HOSTS),
    refuse("MEGATRON_RL_ENGINE_LAUNCHER: starts the engines of two nodes by 'srun a', on the same devices; set a different line for",
           machine.nodes_have_separate_launchers, "train eval", *TWO_HOSTS, launchers="srun a\nsrun a"),
    refuse("sync.host = '127.0.0.1': is only reachable from this machine, but an engine's ranks on 2 nodes must connect to it; give an",
           machine.nodes_reach_the_engines_first_node, "train eval", '--rollout.hosts=["127.0.0.1", "10.0.0.6"]',
           "--rollout.nodes_per_engine=2", "--rollout.tp=2", launchers="\nsrun b"),
    refuse("sync.transport = 'shared_memory': needs trainer and engines on one host; MEGATRON_RL_ENGINE_LAUNCHER starts engines on",
           machine.transport_reaches_the_engines, "train", *TWO_HOSTS, launchers="srun a\nsrun b"),
    refuse("PYTORCH_CUDA_ALLOC_CONF = 'expandable_segments:True': ",
           machine.engine_can_release_its_memory, "train eval", GLOO, gpus=1,
           scene=lambda patch: patch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")),
    refuse("precision.high = 'bf16': cannot attend on a GPU: varlen_attn of torch 2.10.0 does not accept scale, enable_gqa; install",
           machine.attention_runs_here, "train", GLOO, gpus=1, scene=use_old_torch),
    refuse("precision.reduction = 'ranks': cannot run here: torch is a CPU build, sgl-deep-gemm is not installed",
           machine.shared_kernels_run_here, "train eval", "--precision.mode=bf16", "--precision.reduction=ranks", GLOO, gpus=1),
    refuse("precision.mode = 'bf16': cannot run on a GPU: triton 3.6.0 is not a supported version, 3.7 to below 4; install torch's CUDA",
           machine.kernels_can_be_compiled, "train", "--precision.mode=bf16", GLOO, gpus=1,
           scene=lambda patch: patch.setattr(requirements, "find_version", {"triton": "3.6.0"}.get)),
    refuse("rollout.engine = 'sglang': does not start on a GPU without sglang-kernel and flashinfer-python (not installed); bash launch/",
           machine.engine_has_its_packages, "train eval", GLOO, KIND, gpus=2, scene=use_hopper),
    refuse("rollout.engine = 'sglang': does not start on a GPU without flashinfer-python (not installed); bash launch/install_gpu.sh",
           machine.engine_has_its_packages, "train eval", GLOO, KIND, gpus=2, scene=lambda patch: use_hopper(patch, "sgl_kernel")),
    refuse("rollout.sglang.attention_backend: is not set, and the installed sglang-kernel has",
           machine.engine_has_its_packages, "train eval", GLOO, KIND, gpus=2,
           scene=lambda patch: use_hopper(patch, "sgl_kernel", "flashinfer")),
    refuse("rollout.sglang.attention_backend = 'triton': adds up in an order of its own, but precision.reduction = 'tree' asks for the",
           machine.engine_accepts_its_options, "train eval", GLOO, KIND, TRITON, gpus=2),
    refuse("rollout.sglang.attention_backend = 'triton': needs a GPU, because engines attend by torch_native on a CPU; leave it out",
           machine.engine_accepts_its_options, "train eval", TRITON, "--precision.reduction=fast"),
    refuse("environment.name = 'json:nothing': ",
           files.environment_can_be_loaded, "train eval", "--environment.name=json:nothing", "--environment.max_tokens=8"),
    refuse("agent.name = 'json:nothing': ",
           files.agent_can_be_loaded, "train eval", "--agent.name=json:nothing", "--agent.max_tokens=512"),
    refuse("agent.command = 'no-such-program': is not an executable program on this machine; give its path, or add its folder to PATH",
           files.agent_can_be_loaded, "train eval", '--agent.command=["no-such-program"]', "--agent.max_tokens=512"),
    refuse("agent: ",
           files.agent_has_a_chat_template, "train", AGENT, "--agent.max_tokens=512"),
    refuse("algorithm.loss = 'ppo': failed on a toy batch (TypeError: token_losses() got an unexpected keyword argument 'tau'); see docs",
           files.loss_and_advantage_can_be_computed, "train", "--algorithm.loss_settings.tau=2.0"),
    refuse("MODEL = 'model': tensor model.layers.0.mlp.gate_proj.weight ",
           files.tensors_match_the_model, "train eval", model={"intermediate_size": 640}),
    refuse("MODEL = 'glm': tensor model.layers.1.enorm.weight ",
           files.mtp_tensors_are_complete, "train", MTP, "--model.path=glm",
           scene=lambda _: make_byte_tokenizer(make_model(Path("glm"), GLM))),
    refuse("critic.path = 'values': tensor score.weight ",
           files.tensors_match_the_critic, "train", PPO, "--critic.path=values",
           scene=lambda _: with_value_head(Path("values"), labels=2)),
    refuse("MODEL = 'fp8': tensor model.layers.0.self_attn.q_proj.weight_scale_inv ",
           files.scales_match_the_precision, "train", "--model.path=fp8"),
    refuse("model.path = 'bare': ",
           files.tokenizer_can_be_loaded, "train", "--model.path=bare",
           scene=lambda patch: shutil.copytree("model", "bare", ignore=lambda *_: ["tokenizer.json"])),
    refuse("model.path = 'model': its tokenizer has 256 tokens and the end token 256, but config.json vocab_size is 256; use config.json",
           files.tokenizer_can_be_loaded, "train", model={"vocab_size": 256}),
    refuse("data.train = 'no.jsonl': does not exist; use a JSONL, JSON or Parquet file, a hub data set as hf:OWNER/NAME:SPLIT, or",
           files.problems_can_be_read, "train", "--data.train=no.jsonl"),
    refuse("data.train = 'rows.jsonl:1': has no field prompt, found question, answer; set data.columns.question to one of them",
           files.problems_can_be_read, "train", "--data.train=rows.jsonl", '--data.columns={question = "prompt", answer = "answer"}',
           scene=lambda patch: Path("rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')),
    refuse("data.chat: the tokenizer of model has no chat template; set it to false, or add chat_template.jinja to that folder",
           files.problems_can_be_read, "train", "--data.chat=true"),
    refuse("MODEL = 'hf:someone/unknown@5555555555555555555555555555555555555555': ",
           files.weights_can_be_fetched, "train eval", f"--model.path={ON_HUB}", checkpoint=ON_HUB, scene=keep_no_weights_offline),
    refuse("reward.function = 'json:nothing': ",
           files.rewards_can_be_computed, "train eval", "--reward.function=json:nothing"),
    refuse("environment.name = 'own_environment:Broken': fails on the first problems of a set, such as arithmetic:",
           files.turns_can_be_taken, "train", "--environment.name=own_environment:Broken", "--environment.max_tokens=8",
           scene=lambda _: Path("own_environment.py").write_text(  # from the second turn on
               "from megatron_rl.rollout.environments.base import Message\nclass Broken:\n def __init__(self, problem): self.turns = 0\n"
               " def step(self, text):\n  self.turns += 1\n  return Message('?') if self.turns == 1 else text.rows")),
    refuse("log.trackers = 'json:loads': must be a plain function of (folder, config, resume_step): too many positional arguments; see",
           files.trackers_can_be_loaded, "train", '--log.trackers=["tensorboard", "json:loads"]'),
    refuse("checkpoint.resume = 'model': has no checkpoints/step_NNNNN; give the folder of a run that wrote a checkpoint, or use auto",
           resumed_run.resumed_run_has_the_same_settings, "train", "--checkpoint.resume=model"),
    refuse("checkpoint.allow_changes = 'rollout.max_new_token': is not a field of the configuration; did you mean rollout.max_new_tokens?",
           resumed_run.allowed_changes_are_fields, "train plan", '--checkpoint.allow_changes=["rollout.max_new_token"]'),
]
# fmt: on


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with three checkpoints: dense, with experts, and in FP8 with scales that are not powers of two."""
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "model", num_hidden_layers=2)
    make_checkpoint(folder / "experts", num_experts=4)
    with_random_blocks(make_checkpoint(folder / "fp8"), "fp32", 1)
    return folder


@pytest.fixture
def workplace(models, tmp_path, monkeypatch) -> Path:
    """A folder with valid checkpoints and a valid run.toml, without variables of a launcher. No engine is started."""
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
    if mistake.gpus:
        monkeypatch.setattr(requirements, "find_version", {"triton": "3.8.0"}.get)
    mistake.scene(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", str(mistake.ranks))
    monkeypatch.setenv(LAUNCHER_VARIABLE, mistake.launchers)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: mistake.gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: mistake.gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: mistake.capability)


def refused(command: str, mistake: Mistake) -> str:
    """Return the error that the command prints, after asserting that it is one line and that the exit code is 2."""
    gpu = next(name for name, known in GPUS.items() if known.capability == mistake.capability)
    plan = ["--top", "1", "--gpus-per-node", str(mistake.gpus or 8), "--gpu", gpu]
    options = {"eval": ["--checkpoint", mistake.checkpoint], "plan": plan}
    result = CliRunner().invoke(app, [command, "run.toml", *options.get(command, []), *mistake.overrides])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("megatron-rl: ") and result.stderr.count("\n") == 1
    return result.stderr.removeprefix("megatron-rl: ").rstrip()


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.rule.__name__)
def test_all_commands_refuse_a_mistake_with_the_same_line(mistake, workplace, monkeypatch):
    set_scene(mistake, workplace, monkeypatch)
    needs = next(rule.needs for rule in RULES if rule.check is mistake.rule)
    assert mistake.commands.split() == [command for command, known in COMMANDS.items() if needs in known]
    for command in mistake.commands.split():  # `plan` adds layouts that work
        line = mistake.line.replace("MODEL", "--checkpoint" if command == "eval" else "model.path")
        assert refused(command, mistake).startswith(line), command


def find_lines(raised: BaseException) -> set[tuple[str, int]]:
    """Return file and line of each frame in the traceback."""
    return {(Path(frame.f_code.co_filename).name, line) for frame, line in traceback.walk_tb(raised.__traceback__)}


def test_each_check_and_each_raise_statement_is_reached(workplace):
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
    for module in (settings, layouts, rank_sums, machine, files, teacher):
        path = Path(module.__file__)
        refusals = {(path.name, node.lineno) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)}
        assert refusals <= passed, refusals - passed


def test_only_rank_0_reads_files(workplace, monkeypatch):
    mistake = load_config(workplace / "run.toml", ["--data.train=no.jsonl", "--train.layout.dp=2"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_run(mistake).world_size == 2
    with pytest.raises(UserError, match="data.train = 'no.jsonl': does not exist"):
        check_on_rank_0(mistake)
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_on_rank_0(mistake)  # already done by `check_run`
