"""What the rows of the covering array (`support.covering`) choose from, and what no row has."""

from functools import cache
from typing import Any, get_args

from examples.arithmetic.calculator import __name__ as CALCULATOR
from examples.arithmetic.tool_agent import AGENT
from megatron_rl.config.algorithm import GAE, PRESETS, Correction
from megatron_rl.plugs import ADVANTAGES, LOSSES
from parallel.formats import MODES
from parallel.transport import TRANSPORTS
from support.families import ENGINE_ARCHITECTURES, LLAMA3, YARN

LEFT_OUT = {
    ("precision.backend", "transformer_engine"): "needs a GPU: tests/gpu",
    ("precision.backend", "deep_gemm"): "needs a GPU: tests/gpu",
    ("sync.transport", "cuda_ipc"): "needs a GPU: tests/gpu",
}
"""Values that no row has, with the reason. Settings that are not enumerations have their own tests, such as `checkpoint.resume`
(tests/engine/test_long_runs.py), plugs of one's own (tests/engine/test_example_plugs.py), and several nodes (tests/slurm)."""

MODELS = ENGINE_ARCHITECTURES | {
    "llama": ENGINE_ARCHITECTURES["llama"] | {"rope_scaling": LLAMA3, "max_position_embeddings": 16384},
    "qwen2": ENGINE_ARCHITECTURES["qwen2"] | {"tie_word_embeddings": True},
    "deepseek_v3": ENGINE_ARCHITECTURES["deepseek_v3"] | {"rope_scaling": YARN | {"factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.7}},
    "glm4_moe": ENGINE_ARCHITECTURES["glm4_moe"] | {"num_nextn_predict_layers": 1},
}
"""config.json of each family. Together they have all kinds of rotary positions, tied embeddings, and layers for multi-token prediction."""


def _read(name: str, form: dict[str, str], curriculum: str = "none", pass_rate: str = "column") -> dict[str, Any]:
    """Return the overrides for the problems of a file of `support.covering.write_problems`."""
    source = f'"FOLDER/train_{name}", curriculum = "{curriculum}", pass_rate = "{pass_rate}"'
    return form | {"data.train": f"[{{source = {source}}}]", "data.eval": f"FOLDER/eval_{name}"}


_COLUMNS = {"data.columns": '{question = "q", answer = "a", level = "l", pass_rate = "p"}'}
_KL, _TEACHER = {"algorithm.kl_coef": 0.01}, {"teacher.path": "FOLDER/model"}
_LENGTH = '{name = "length", full_tokens = 4, zero_tokens = 8}'

TOGETHER: dict[str, dict[str, dict[str, Any]]] = {  # each choice meets each other one in some row, unless preflight refuses both together
    "trainer": {
        "one rank": {},
        "tp": {"train.layout.tp": 2},
        "pp": {"train.layout.pp": 2},
        "vpp": {"train.layout.pp": 2, "train.layout.vpp": 2},
        "cp": {"train.layout.cp": 2},
        "dp": {"train.layout.dp": 2},
        "ep": {"train.layout.dp": 2, "train.layout.ep": 2},
    },
    "engines": {
        "one": {},
        "tp": {"rollout.tp": 2},
        "two": {"rollout.engines": 2},
        "ep": {"rollout.tp": 2, "rollout.ep": 2},
    },
    "model": {  # experts of gpt-oss are not cut over ranks
        name: {"train.layout.etp": 1} if name == "gpt_oss" else {} for name in ("qwen3", *(name for name in MODELS if name != "qwen3"))
    },
    "weights": {name: {} for name in ("fp32", "bf16", "fp8", "int8")},  # of the checkpoint
    "more": {
        "nothing": {},
        "replay": {"replay.prompts_per_step": 2, "replay.max_staleness": 2},
        "teacher": _TEACHER,
        "teacher in the loss": _TEACHER | {"teacher.kl_in": "loss"},
        "teacher's k3": _TEACHER | {"teacher.kl_in": "loss", "teacher.kl_estimator": "k3"},
        "lora": {"lora.rank": 8},
        "lora of MLPs": {"lora.rank": 8, "lora.targets": '["linear_fc1", "linear_fc2"]'},
        "lora of delta nets": {"lora.rank": 8, "lora.targets": '["in_proj_qkvz", "out_proj"]'},
    },
    "KL": {
        "none": {},
        "k2": _KL | {"algorithm.kl_estimator": "k2"},
        "k3": _KL | {"algorithm.kl_estimator": "k3"},
        "k1 corrected": _KL | {"algorithm.kl_estimator": "k1", "algorithm.kl_bias_correction": "true"},
        "k3 corrected": _KL | {"algorithm.kl_estimator": "k3", "algorithm.kl_bias_correction": "true"},
        "in the reward": _KL | {"algorithm.kl_in": "reward"},
    },
    "batch": {
        "one update": {},
        "two updates": {"algorithm.updates_per_step": 2},
        "dynamic sampling": {"algorithm.dynamic_sampling_max_rounds": 2},
        "more prompts": {"rollout.over_sampling_prompts": 2},
    },
    "sync.transport": {
        **{name: {"sync.transport": name} for name in TRANSPORTS.builtin if name not in ("cuda_ipc", "disk")},
        "disk": {"sync.transport": "disk", "sync.dir": "FOLDER/chunks"},
    },
    "algorithm.multi_objective_aggregation": {
        "sum_then_normalize": {},
        "normalize_then_sum": {
            "algorithm.multi_objective_aggregation": "normalize_then_sum",
            "reward.function": "",
            "reward.functions": f'[{{name = "math"}}, {_LENGTH}]',
        },
    },
    "ahead": {"no": {}, "one step": {"placement.max_staleness": 1}},
    "router": {"free": {}, "loss": {"train.router_aux_loss": 0.01}, "bias": {"train.router_bias_rate": 0.001}},
    "MTP": {"kept": {}, "trained": {"train.mtp_loss_scaling_factor": 0.1}},
    "precision.mode": {name: {"precision.mode": name} for name in MODES},
    "algorithm.loss": {name: {"algorithm.loss": name} for name in LOSSES.builtin},
    "algorithm.advantage": {name: {"algorithm.advantage": name} for name in (*ADVANTAGES.builtin, GAE)},
    "algorithm.correction": {name: {"algorithm.correction": name} for name in ("none", *get_args(Correction))},
}
ALONE: dict[str, dict[str, dict[str, Any]]] = {  # each choice is in some row
    "algorithm.name": {name: {"algorithm.name": name} for name in PRESETS},
    "train.decay_style": {
        **{name: {"train.decay_style": name} for name in ("constant", "linear", "cosine")},
        "WSD": {"train.decay_style": "WSD", "train.wsd_decay_steps": 1},
    },
    "data": {
        "generated": {},
        **{name: _read(f"{name}.jsonl", {"data.format": name}) for name in ("gsm8k", "deepmath", "aime", "verl")},
        "math": _read("math.json", {"data.format": "math"}, "level"),
        "columns": _read("columns.parquet", _COLUMNS, "pass_rate"),
        "measured": _read("columns.parquet", _COLUMNS, "pass_rate", "measured"),
    },
    "reward": {
        "own": {},
        "math": {"reward.function": "math"},
        "exact": {"reward.function": "exact"},
        "several": {
            "reward.function": "",
            "reward.functions": f'[{{name = "math"}}, {{name = "format", pattern = ".*a.*"}}, {_LENGTH}]',
        },
        "http": {"reward.function": "", "reward.functions": '[{name = "http", url = "SERVER"}]'},
    },
    "turns": {
        "one": {},
        "environment": {"environment.name": f"{CALCULATOR}:Calculator", "environment.max_turns": 3, "environment.max_tokens": 16},
        "agent": {
            "agent.name": AGENT,
            "agent.tool_parser": "qwen25",
            "agent.reasoning_parser": "qwen3",
            "agent.max_calls": 3,
            "agent.max_tokens": 224,
            "agent.workers": 2,
        },
        "agent's own reward": {
            "agent.name": "support.agent_programs:judge_oneself",
            "agent.own_reward": "true",
            "agent.max_tokens": 224,
            "agent.workers": 2,
            "reward.function": "",
        },
    },
    "reward.thinking": {
        "auto": {},
        "none": {"reward.thinking": "none"},
        "own": {"reward.thinking": '["<t>", "</t>"]'},
    },
    "trackers": {
        **{name: {"log.trackers": f'["{name}"]'} for name in ("tensorboard", "wandb", "mlflow")},
        "none": {"log.trackers": "[]"},
    },
    "sampling": {
        "all tokens": {},
        "top p": {"rollout.top_k": 64, "rollout.top_p": 0.9},
        "min p": {"rollout.top_k": 64, "rollout.min_p": 0.01},
    },
    "stop": {"end token": {}, "strings": {"rollout.stop": '["#", "ab"]'}},
    "prefill": {"whole": {}, "in chunks": {"rollout.chunked_prefill_size": 16}},
    "evaluation": {"greedy": {}, "samples": {"eval.samples": 2, "eval.temperature": 0.7, "eval.top_k": 8}},
    "checkpoints": {"last": {}, "every step": {"checkpoint.every": 1}},
    "canary": {"two prompts": {}, "none": {"sync.canary": 0}},
    "attribution": {"never": {}, "every step": {"log.attribute_every": 1}},
    "profile": {"never": {}, "first step": {"log.profile_steps": "[1]"}},
    "clipping": {"single": {}, "dual": {"algorithm.dual_clip": 3.0}},
    "calibration": {"never": {}, "every step": {"algorithm.calibrate_every": 1}},
    "off-policy mask": {"none": {}, "some": {"algorithm.off_policy_mask_threshold": 0.1}},
    "overlong": {"free": {}, "penalty": {"algorithm.overlong_share": 0.5}},
    "gradients": {"clipped": {}, "as they are": {"train.clip_grad": 0}},
    "weight decay": {"none": {}, "some": {"train.weight_decay": 0.1}},
    "critic": {"from the start": {}, "alone first": {"critic.critic_warmup": 1}},
}
NEEDS: dict[tuple[str, str], dict[str, str]] = {
    **{each: {"model": "glm4_moe"} for each in (("trainer", "ep"), ("engines", "ep"), ("router", "loss"), ("router", "bias"))},
    **{("algorithm.routing_replay", name): {"model": "qwen3_moe"} for name in ("trainer", "engine")},
    ("MTP", "trained"): {"model": "glm4_moe"},
    ("model", "gpt_oss"): {"precision.mode": "bf16"},
    ("ahead", "one step"): {"placement.kind": "disaggregated", "algorithm.correction": "tis"},
    ("more", "replay"): {"algorithm.correction": "tis"},
    ("algorithm.loss", "kl_cov"): {"batch": "two updates"},
    ("KL", "in the reward"): {"algorithm.advantage": "leave_one_out"},
    ("algorithm.advantage_std", "population"): {"algorithm.advantage": "group_std"},
    ("critic", "alone first"): {"algorithm.advantage": "gae"},
    ("sync.running", "continue"): {"ahead": "one step", "placement.kind": "disaggregated", "algorithm.correction": "tis"},
    ("clipping", "dual"): {"batch": "two updates"},
    ("calibration", "every step"): {"batch": "two updates"},
    ("data", "verl"): {"data.chat": "true"},
}
"""Choices of other factors without which preflight refuses a choice, to find valid rows faster."""
COMPOSED = {
    *(f"algorithm.{name}" for name in ("kl_estimator", "kl_bias_correction", "kl_in")),
    "data.train.curriculum", "data.train.pass_rate", "agent.own_reward", "lora.targets", "teacher.kl_in", "teacher.kl_estimator",
}  # fmt: skip
"""Enumerations and switches that are part of a choice above."""

_BOTH = {"trainer", "more", "batch", "ahead", "precision.mode"}
_BEFORE_THE_LOSS = {f"algorithm.{name}" for name in ("advantage", "advantage_std", "multi_objective_aggregation")}
_IN_THE_LOSS = {f"algorithm.{name}" for name in ("loss", "correction", "aggregate", "old_policy")}
_ALONE = {"sync.on_mismatch", "reward.on_error", "data.overlap", "data.chat", "data.special_text"}


@cache
def meets(one: str, other: str) -> bool:
    """Return whether every two choices of two factors must meet in a row: if both are about the computation of the loss, or neither."""
    if {one, other} & {*ALONE, *_ALONE} or ({one, other} & _BEFORE_THE_LOSS and {one, other} & _IN_THE_LOSS):
        return False
    return _is_of_the_loss(one) == _is_of_the_loss(other) or bool({one, other} & _BOTH)


def _is_of_the_loss(name: str) -> bool:
    return name.split(".")[0] in ("KL", "algorithm") and name != "algorithm.routing_replay"
