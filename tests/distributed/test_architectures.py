"""Every architecture of the trainer computes what Hugging Face transformers computes from the same checkpoint."""

import pytest
import torch
from support import trainer, transformers_reference
from support.families import ARCHITECTURES, by_kind
from support.models import FP32
from support.processes import ROOT
from support.trainer import Trainer
from support.transformers_reference import load, response_logprobs

from megatron_rl.batch.training_sample import TrainingSample


def text_logprobs(folder, precision, documents):
    """Return the log-probs of every token but the first of each document, packed into micro-batches as in a step."""
    samples = [TrainingSample(ids[:1], ids[1:]) for ids in documents]
    return torch.cat(Trainer(folder, precision).actor.compute_logprobs(samples)[0])


def score_texts(folder, documents, dtype):
    """Return the same log-probs by transformers."""
    return response_logprobs(load(folder, dtype), [(ids[:1], ids[1:]) for ids in documents])


@pytest.fixture(scope="module", params=[*by_kind(ARCHITECTURES), "tied"])
def folder(request, model_folder, tied_checkpoint):
    return tied_checkpoint if request.param == "tied" else model_folder(request.param)


def test_logits_equal_transformers(folder, worlds, transformers_process):
    ids = torch.randint(0, 384, (3, 40), generator=torch.Generator().manual_seed(5)).tolist()
    expected = transformers_process.call(transformers_reference.logits, folder, ids)[0]
    assert expected.std() > 0.1
    for size in (1, 2):
        parts = worlds(size).call(trainer.logits, folder, FP32, ids)
        difference = (torch.cat(parts, dim=-1) - expected).abs().max()
        assert difference < 1e-5 * expected.abs().max(), f"{size} ranks: {difference}"


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_logits_of_hybrid_models_are_nearer_to_float64_than_those_of_transformers(family, model_folder, worlds, transformers_process):
    """By token, a float32 recurrence rounds less than transformers' chunks, so the difference between both is mostly transformers'."""
    ids, folder = torch.randint(0, 384, (3, 200), generator=torch.Generator().manual_seed(5)).tolist(), model_folder(family)
    exact = transformers_process.call(transformers_reference.float64_logits, folder, ids)[0]
    theirs = transformers_process.call(transformers_reference.logits, folder, ids)[0]
    ours = worlds(1).call(trainer.logits, folder, FP32, ids)[0]
    error, reference_error = (((found - exact).square().mean() / exact.square().mean()).sqrt() for found in (ours, theirs))
    assert 1e-8 < error < reference_error < 4e-6, f"{error:.3g}, transformers {reference_error:.3g}"  # a CPU with AMX rounds more often


def test_logprobs_of_a_text_equal_transformers(folder, worlds, transformers_process):
    """FP32 differs only by the order of sums. BF16 is at most 1.5 times as far from FP32 as transformers' BF16 is."""
    text = (ROOT / "LICENSE").read_bytes()[:600]
    documents = [list(text[start : start + 90]) for start in range(0, len(text), 90)]  # the byte tokenizer's ids
    dtypes = torch.float32, torch.bfloat16
    reference, rounded = (transformers_process.call(score_texts, folder, documents, dtype)[0] for dtype in dtypes)
    ours, ours_rounded = (worlds(1).call(text_logprobs, folder, {**FP32, "high": high}, documents)[0] for high in ("fp32", "bf16"))
    assert len(reference) == len(text) - len(documents) > 500 and reference.std() > 0.3
    assert (ours - reference).abs().max() < 2e-5
    assert (ours_rounded - reference).abs().mean() < 1.5 * (rounded - reference).abs().mean()
