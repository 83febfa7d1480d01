"""What a quantised engine should compute, computed by the trainer's own model: its linear layers made to multiply as the engine's do."""

from __future__ import annotations

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.mcore.engine_emulation import emulate_engine
from megatron_rl.mcore.layers.fp8_linear import find_fp8_layers
from megatron_rl.types import SamplingParams
from support.served import _now


def generate_and_emulate(prompts: list[list[int]], tokens: int = 24) -> dict[str, torch.Tensor]:
    """Samples answers from the served engine; log-probs of all sampled tokens by the engine, the trainer, and the trainer's model with
    the products of the engine."""
    here = _now[0]
    assert not find_fp8_layers(here.trainer.model)  # the trainer computes in high precision
    answers = here.engine.generate(prompts, SamplingParams(temperature=1.0, max_new_tokens=tokens))
    sequences = [TrainingSample(prompt, answer.output_ids_T) for prompt, answer in zip(prompts, answers, strict=True)]
    trainer = torch.cat(here.trainer.actor.compute_logprobs(sequences)[0])
    with emulate_engine(here.trainer.model, here.trainer.collect_named_tensors(), here.trainer.contract.activation_format) as layers:
        emulated = torch.cat(here.trainer.actor.compute_logprobs(sequences)[0])
    mlps = here.trainer.hf_config.get("num_experts") or 1  # of a layer
    assert layers == (2 + 2 * mlps) * here.trainer.hf_config["num_hidden_layers"]
    return {
        "engine": torch.tensor([value for answer in answers for value in answer.logprobs_T]),
        "trainer": trainer,
        "emulated": emulated,
    }
