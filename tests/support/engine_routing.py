"""A real engine's record of which experts served each token, and the trainer's replay of it; see `support.trainer_engine`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.hf.routing_record import extend_routing_record
from megatron_rl.mcore.passes.engine_emulation import emulate_engine
from support.trainer import Trainer
from support.trainer_engine import current, join_logprobs

ENVIRONMENT_IDS = [7, 8, 9]
"""What an environment says between two turns."""


def generate_two_turns(prompts: list[list[int]], tokens: int = 12) -> tuple[list[TrainingSample], bool, int]:
    """(answers of two turns with the engine's log-probs and routing, whether the second turn's record begins with the first's, tokens that
    the second turns took from the prefix cache)."""
    first = current().sample(prompts, tokens)
    longer = [[*prompt, *answer.output_ids_T.tolist(), *ENVIRONMENT_IDS] for prompt, answer in zip(prompts, first, strict=True)]
    second = current().sample(longer, tokens)
    samples, same = [], True
    for prompt, turn, next_turn in zip(prompts, first, second, strict=True):
        logprobs = join_logprobs([turn, next_turn])
        sampled = [True] * len(turn.output_ids_T) + [False] * len(ENVIRONMENT_IDS) + [True] * len(next_turn.output_ids_T)
        same &= bool((next_turn.routed_experts_T[: len(turn.routed_experts_T)] == turn.routed_experts_T).all())
        experts = extend_routing_record(turn.routed_experts_T, next_turn.routed_experts_T)
        ids = [*turn.output_ids_T.tolist(), *ENVIRONMENT_IDS, *next_turn.output_ids_T.tolist()]
        current().trainer.actor.routing.shape.check(experts, len(prompt) + len(ids), "an answer")
        samples.append(
            TrainingSample(prompt, ids, rollout_logprobs=logprobs, response_mask=sampled, routed_experts=torch.from_numpy(experts))
        )
    return samples, same, sum(turn.cached_tokens for turn in second)


def score(samples: list[TrainingSample]) -> dict[str, Any]:
    """All sampled tokens' log-probs: the engine's, the trainer's with and without replay, and those of the trainer's model with the
    engine's products, without replay; and the share of tokens whose experts differ from the engine's in each of the three."""
    trainer = current().trainer
    routing, results = trainer.actor.routing, {"engine": torch.cat([sample.rollout_logprobs for sample in samples])}

    def compute(name: str) -> None:
        with routing.collect_stats(samples) as stats:
            results[name] = current().compute_logprobs(samples)
        results[f"{name} differs"] = stats.gather_metrics()["router/differs"]

    compute("replay")
    with routing.disable_replay():
        compute("free")
        with emulate_engine(trainer.model, trainer.collect_named_tensors(), trainer.contract.engine_format):
            compute("emulated")
    return results


def measure_dense_mismatch(checkpoint: Path, precision: dict[str, Any], samples: list[TrainingSample]) -> float:
    """Mean |dlogp| of the same tokens between a dense model and itself with its engine's products, which are the engine's bits."""
    trainer = Trainer(checkpoint, precision)
    plain = [replace(sample, routed_experts=torch.empty(0)) for sample in samples]
    own = torch.cat(trainer.actor.compute_logprobs(plain)[0])
    with emulate_engine(trainer.model, trainer.collect_named_tensors(), trainer.contract.engine_format):
        return float((torch.cat(trainer.actor.compute_logprobs(plain)[0]) - own).abs().mean())
