"""A forward pass without FP8 within a unified-FP8 run, as calibrated clipping takes it."""

from __future__ import annotations

from support import trainer
from support.models import FP8, FP32, random_sequences


def test_without_fp8_a_model_is_the_unquantised_one(worlds, checkpoint):
    """The same masters, of which replicas hold a part each; the same FP32 products as a model that was never quantised; then FP8 again, bit
    by bit."""
    batch = random_sequences(8, 0)
    fp8, other = worlds(2).call(trainer.logprobs_without_fp8, checkpoint, FP8, batch)
    fp32 = worlds(1).call(trainer.logprobs_without_fp8, checkpoint, FP32, batch)[0]
    assert (fp8["without"] - fp32["with"]).abs().max() < 1e-5  # sums in another order
    assert (fp8["without"] - fp8["with"]).abs().max() > 1e-3  # what quantisation changes
    assert fp8["with"].equal(fp8["again"]) and fp8["without"].equal(other["without"])
