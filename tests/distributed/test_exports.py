"""Exports of every family are loaded by transformers and PEFT, and give the trainer's log-probs."""

import json
import os
import shutil
import sys
import warnings
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from support import export_scores, trainer
from support.families import ARCHITECTURES, CLASSES, QUANTIZED
from support.hybrids import make_whole
from support.models import FP32, random_sequences
from support.trainer import Trainer, compute_logprobs, negative_log_likelihood
from support.transformers_reference import load, response_logprobs

from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.checkpoint.export import export_adapters
from parallel.layout import Layout

WHOLE = ("qwen3_5", "qwen3_5_moe")
ALONE = "experts without other MLPs"
STACKING = ("gpt_oss", "qwen3_5_moe_text")
ATTENTION, DELTA_NETS, MLP = ("linear_qkv", "linear_proj"), ("in_proj_qkvz", "out_proj"), ("linear_fc1", "linear_fc2")
DEFAULT = ("qwen3",)
EXACT = 1e-4  # float32 on both sides
ROUNDED = {"bf16": 0.03, "fp8": 0.3}  # mean difference of weights in BF16 or FP8 from the trainer's in float32


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


@pytest.fixture(scope="module")
def transformers_and_accelerate():
    with export_scores.start_process() as process:
        yield process


@pytest.mark.parametrize("family", mostly_long(CLASSES, DEFAULT))
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_transformers_computes_the_trainers_logprobs_with_every_export(
    worlds, transformers_and_accelerate, model_folder, tmp_path, family, precision
):
    base, batch, run, folder = (
        model_folder(family, **whole_blocks(family)),
        random_sequences(4, 0),
        tmp_path / "step_00001",
        tmp_path / "export",
    )
    (trained,) = worlds(1).call(train, base, batch, run)
    if precision == "fp8" and family not in QUANTIZED:
        with pytest.raises(UserError, match="is not supported for"):
            worlds(1).call(trainer.export, run, folder, precision)
        return
    assert worlds(1).call(export_and_listen, run, folder, precision) == [""]
    (read,) = worlds(1).call(score_by_trainer, folder, batch)
    found = transformers_and_accelerate.submit(export_scores.score, folder, pairs(batch)).result()
    torch.testing.assert_close(found, read, rtol=0, atol=EXACT)
    assert (found - trained).abs().mean() < ROUNDED[precision]


def whole_blocks(family):
    """Return changes of a family's config.json that make all its FP8 blocks whole: latent keys and rotated keys are one tensor's rows."""
    return {"qk_rope_head_dim": 128} if "kv_lora_rank" in ARCHITECTURES[family] else {}


def test_an_export_says_that_transformers_misreads_partial_blocks(worlds, transformers_and_accelerate, model_folder, tmp_path):
    """It takes 192 rows with two rows of scales for blocks of 96 rows. Of 576 rows, as published, it finds no blocks."""
    base, batch, run, folder = model_folder("deepseek_v3"), random_sequences(2, 0), tmp_path / "step_00001", tmp_path / "export"
    worlds(1).call(train, base, batch, run)
    (said,) = worlds(1).call(export_and_listen, run, folder, "fp8")
    assert said.startswith("edge blocks of some tensors are partial: transformers")
    (read,) = worlds(1).call(score_by_trainer, folder, batch)
    found = transformers_and_accelerate.submit(export_scores.score, folder, pairs(batch)).result()
    assert (found - read).abs().max() > 0.1


def test_an_export_says_that_transformers_misreads_int8(worlds, transformers_and_accelerate, model_folder, tmp_path):
    """It warns that it does not know the kind and that scales are left over, and goes on."""
    batch, run, folder = random_sequences(2, 0), tmp_path / "step_00001", tmp_path / "export"
    (trained,) = worlds(1).call(train, model_folder("qwen3", num_hidden_layers=1), batch, run)
    (said,) = worlds(1).call(export_and_listen, run, folder, "int8")
    assert said.startswith("transformers 5.19 ignores the scales of INT8 weights")
    (read,) = worlds(1).call(score_by_trainer, folder, batch)
    assert (read - trained).abs().mean() < ROUNDED["fp8"]
    found = transformers_and_accelerate.submit(export_scores.score, folder, pairs(batch)).result()
    assert not torch.allclose(found, read, atol=1.0)


def export_and_listen(run, folder, *precision):
    """Export a run, or its adapters without a precision. Return what was printed."""
    with redirect_stdout(StringIO()) as said:
        (trainer.export if precision else export_adapters)(run, folder, *precision)
    return said.getvalue()


@pytest.mark.parametrize("family", mostly_long((*CLASSES, ALONE), ("qwen3", "qwen3_moe", ALONE)))
@pytest.mark.parametrize("parts", ["attention", "all"])
def test_peft_computes_the_trainers_logprobs_with_adapters_of_every_family(
    worlds, transformers_process, model_folder, tmp_path, family, parts
):
    """But PEFT has no place for adapters of experts that a family's checkpoints stack, and the export says so."""
    base = model_folder("qwen3_moe", mlp_only_layers=[]) if family == ALONE else model_folder(family)
    batch, run, adapters = random_sequences(4, 0), tmp_path / "step_00001", tmp_path / "adapters"
    targets = ATTENTION["kv_lora_rank" in read_config(base) :] + DELTA_NETS * ("linear_key_head_dim" in read_config(base))
    settings = {"rank": 8, "alpha": 16.0, "targets": targets + MLP * (parts == "all")}
    (result,) = worlds(1).call(trainer.train_adapters, base, FP32, settings, [batch], Layout(), run)
    (said,) = worlds(1).call(export_and_listen, run, adapters)
    ((plain, adapted),) = transformers_process.call(score_by_peft, base, adapters, pairs(batch))
    torch.testing.assert_close(plain, result["start"], rtol=0, atol=EXACT)
    assert (adapted - plain).abs().max() > 0.1
    if parts == "all" and family in STACKING:
        assert "no place for them" in said and (adapted - result["trained"]).abs().max() > 0.1
    else:
        assert not said
        torch.testing.assert_close(adapted, result["trained"], rtol=0, atol=EXACT)


@pytest.mark.parametrize("kind", mostly_long(WHOLE, ("qwen3_5",)))
def test_adapters_of_a_model_with_a_vision_tower_move_its_logprobs(worlds, transformers_process, tmp_path, kind):
    """By either class of transformers, `AutoModelForCausalLM`, which is the decoder's, and that of the whole model."""
    base, batch = make_whole(tmp_path / "base", kind), random_sequences(4, 0)
    run, adapters = tmp_path / "step_00001", tmp_path / "adapters"
    targets = (*ATTENTION, *DELTA_NETS, *MLP[: 2 * (kind == "qwen3_5")])
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
