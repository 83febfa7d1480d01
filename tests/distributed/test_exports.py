"""Exports are loaded by transformers and PEFT, and give the trainer's log-probs."""

import json
import os
import shutil
import subprocess
import sys
import warnings

import pytest
import torch
from support import trainer
from support.hybrids import make_whole
from support.models import FP32, random_sequences
from support.trainer import Trainer, compute_logprobs, negative_log_likelihood
from support.transformers_reference import load, response_logprobs

from megatron_rl.mcore.weights.export import export_adapters
from parallel.layout import Layout

WHOLE = ("qwen3_5",)
ATTENTION, MLP = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")
NOT_SERVED = {"gpt_oss": "experts stay BF16"}
"""Families without an FP8 export, and why."""
DEFAULT = ("qwen3",)
EXACT = 1e-4  # float32 on both sides
ROUNDED = 0.1  # weights in BF16 or FP8 beside the trainer's in float32


def train(folder, batch, to):
    """Take a step and write a checkpoint. Return the trained log-probs."""
    trained = Trainer(folder, FP32, {"learning_rate": 1e-3})
    trained.actor.update(batch, negative_log_likelihood)
    trained.save(to)
    return torch.cat(compute_logprobs(trained.actor, batch)[0])


def score_by_trainer(folder, batch):
    return torch.cat(compute_logprobs(Trainer(folder, FP32).actor, batch)[0])


def score_by_peft(base, adapters, sequences, whole=False):
    """Return log-probs of a checkpoint without and with adapters. Fail if PEFT or transformers warns."""
    sys.path.append(f"{sys.prefix}/peft")  # launch/requirements-peft.txt
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32, experts_implementation="eager") if whole else load(base)
    plain = response_logprobs(model, sequences)
    with warnings.catch_warnings(action="error"):
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")  # PEFT's own, which it does use
        return plain, response_logprobs(PeftModel.from_pretrained(model, adapters), sequences)


def pairs(batch):
    return [(sample.prompt_ids.tolist(), sample.response_ids.tolist()) for sample in batch]


def mostly_long(names, default):
    return [pytest.param(name, marks=[] if name in default else pytest.mark.long) for name in names]


@pytest.mark.parametrize("family", DEFAULT)
def test_transformers_computes_the_trainers_logprobs_with_every_export(worlds, model_folder, tmp_path, family):
    batch, run = random_sequences(4, 0), tmp_path / "step_00001"
    (trained,) = worlds(1).call(train, model_folder(family), batch, run)
    for precision in ("bf16", *(() if family in NOT_SERVED else ("fp8",))):
        worlds(1).call(trainer.export, run, tmp_path / precision, precision)
        (read,) = worlds(1).call(score_by_trainer, tmp_path / precision, batch)
        (tmp_path / "batch.json").write_text(json.dumps(pairs(batch)))
        path = os.pathsep.join([*sys.path, f"{sys.prefix}/peft"])  # accelerate, which transformers needs for FP8 before it is imported
        words = [sys.executable, "-m", "support.export_scores", tmp_path / precision, tmp_path / "batch.json", tmp_path / "scores.pt"]
        subprocess.run(words, env=os.environ | {"PYTHONPATH": path}, check=True)
        found = torch.load(tmp_path / "scores.pt", weights_only=True)
        torch.testing.assert_close(found, read, rtol=0, atol=EXACT, msg=lambda text, precision=precision: f"{precision}: {text}")
        assert (found - trained).abs().mean() < ROUNDED


@pytest.mark.parametrize("kind", mostly_long(WHOLE, ("qwen3_5",)))
def test_adapters_of_a_model_with_a_vision_tower_move_its_logprobs(worlds, transformers_process, tmp_path, kind):
    """By either class of transformers, `AutoModelForCausalLM`, which is the decoder's, and that of the whole model."""
    base, batch = make_whole(tmp_path / "base", kind), random_sequences(4, 0)
    run, adapters = tmp_path / "step_00001", tmp_path / "adapters"
    targets = (*ATTENTION, "in_proj_qkvz", "out_proj", *MLP[: 2 * (kind == "qwen3_5")])
    settings = {"rank": 8, "alpha": 16.0, "targets": targets}
    (result,) = worlds(1).call(trainer.train_adapters, base, FP32, settings, [batch], Layout(), run)
    worlds(1).call(export_adapters, run, adapters)
    for whole in (False, True):
        ((plain, adapted),) = transformers_process.call(score_by_peft, base, adapters, pairs(batch), whole)
        torch.testing.assert_close(plain, result["start"], rtol=0, atol=EXACT)
        torch.testing.assert_close(adapted, result["trained"], rtol=0, atol=EXACT)
    assert (result["trained"] - result["start"]).abs().max() > 0.1
    names = {name.split(".layers.")[0] for name in read_names(adapters)}
    assert names == {"base_model.model.model.language_model", "base_model.model.model"}  # vLLM maps the first, PEFT's decoder the second


def read_names(adapters):
    from safetensors import safe_open

    with safe_open(adapters / "adapter_model.safetensors", "pt") as file:
        return list(file.keys())


def test_adapters_name_a_base_that_peft_finds(worlds, model_folder, tmp_path):
    """The hub's name of a model on the hub, with its commit, and the absolute path of a folder."""
    run, settings = tmp_path / "step_00001", {"rank": 8, "alpha": 16.0}
    worlds(1).call(
        trainer.train_adapters, model_folder("qwen3", num_hidden_layers=1), FP32, settings, [random_sequences(2, 0)], Layout(), run
    )
    for base, (path, revision) in {
        "hf:Qwen/Qwen3-8B@abc": ("Qwen/Qwen3-8B", "abc"),
        "some/model": (str(tmp_path / "some/model"), None),
    }.items():
        moved, adapters = tmp_path / str(len(base)) / "step_00001", tmp_path / f"adapters{len(base)}"
        worlds(1).call(rename_base, run, moved, base, adapters, tmp_path)
        described = json.loads((adapters / "adapter_config.json").read_text())
        assert (described["base_model_name_or_path"], described["revision"]) == (path, revision)


def rename_base(run, to, base, adapters, working):
    from megatron_rl.mcore.checkpoint.folder import write_state

    shutil.copytree(run, to)
    write_state(to, json.loads((to / "state.json").read_text()) | {"base": base})
    before = os.getcwd()
    os.chdir(working)
    export_adapters(to, adapters)
    os.chdir(before)
