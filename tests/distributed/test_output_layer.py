"""The output layer that scores a few rows at a time gives the log-probs of whole logits bit for bit, and their gradients."""

from unittest import mock

import pytest
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from support.models import FP8, FP32, random_sequences
from support.trainer import Trainer

from megatron_rl.kernels.sums import reference as tree
from megatron_rl.mcore.layers.linear.output_layer import Entropy, score_positions
from megatron_rl.mcore.passes import logprobs as scoring
from megatron_rl.mcore.passes.context_parallel import ContextShard
from megatron_rl.mcore.passes.logprobs import ScoredPositions

BF16 = {"mode": "bf16", "high": "bf16"}
TOLERANCE = {("bf16", "fp32"): 1e-5, ("bf16", "bf16"): 1e-2, ("fp8_unified", "fp32"): 5e-2, ("fp8_unified", "bf16"): 5e-2}
"""Relative: a gradient in its last bit moves some values to the next E4M3 number."""
CASES = [
    ("qwen3", FP8, 1.0, 1),
    ("qwen2", FP32, 0.7, 1),  # tied
    ("qwen2", BF16, 1.0, 2),
    ("qwen3", FP32, 0.7, 2),
    ("qwen3_moe", {**FP8, "high": "bf16"}, 1.0, 2),
]


def scored_and_whole(folder, precision, batch, temperature):
    """Return the log-probs and gradient buffers of log-probs + 0.3 entropy of one micro-batch, from an output layer that scores a few
    rows at a time, and from whole logits of all ranks."""
    actor = Trainer(folder, precision, {"micro_batch_tokens": 10000}, temperature).actor
    (row,) = actor.make_micro_batches(batch)
    scored = ScoredPositions.from_mask(row.mask)
    targets = scored.select_targets(row, ContextShard.for_this_rank(row.lengths), temperature)

    def compute_from_whole_logits():
        logits = targets.scale(actor.forward(row)[0, scored.index])
        kept, every = (tree.log_softmax(gather_from_tensor_model_parallel_region(part)) for part in (targets.keep(logits), logits))
        return kept.gather(-1, targets.tokens.unsqueeze(-1)).squeeze(-1), -(every.exp() * every).sum(-1)

    def compute_in_chunks():
        with score_positions(actor.chunks[0], scored.index, targets, Entropy.GRADIENT):
            return actor.forward(row)[0].unbind(-1)

    results = []
    for compute in (compute_in_chunks, compute_from_whole_logits):
        actor._forward_chunks[0].zero_grad_buffer()
        with mock.patch.object(scoring, "LOGITS_PER_CHUNK", 1):  # the fewest rows
            logprobs, entropies = compute()
            (logprobs + 0.3 * entropies).sum().backward()
        gradients = {name: weight.main_grad.clone() for name, weight in actor.chunks[0].named_parameters()}
        results.append((logprobs.detach(), gradients))
    return results


@pytest.mark.parametrize("name, precision, temperature, ranks", CASES)
def test_chunks_of_rows_give_what_whole_logits_give(worlds, model_folder, name, precision, temperature, ranks):
    samples = random_sequences(6, seed=1)
    for scored, whole in worlds(ranks).call(scored_and_whole, model_folder(name), precision, samples, temperature):
        assert torch.equal(scored[0], whole[0]) and len(scored[0]) > 40 and scored[0].std() > 0.1
        for weight, gradient in whole[1].items():
            distance = (scored[1][weight] - gradient).norm() / gradient.norm()
            assert distance < TOLERANCE[precision["mode"], precision["high"]], (weight, distance)
