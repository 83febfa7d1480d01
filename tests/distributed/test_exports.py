"""Adapters of models with a vision tower are loaded by PEFT, and give the trainer's log-probs."""

import sys
import warnings

import pytest
import torch
from support import trainer
from support.hybrids import make_whole
from support.models import FP32, random_sequences
from support.transformers_reference import load, response_logprobs

from megatron_rl.mcore.weights.export import export_adapters
from parallel.layout import Layout

WHOLE = ("qwen3_5",)
ATTENTION, MLP = ("linear_qkv", "linear_proj"), ("linear_fc1", "linear_fc2")
EXACT = 1e-4  # float32 on both sides


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
