"""A trainer and an engine that records its routing, with a prefix cache; run in the one rank of a `World`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config.algorithm import AlgorithmConfig
from megatron_rl.hf.routing_record import extend_routing_record
from megatron_rl.mcore.engine_emulation import emulate_engine
from megatron_rl.types import SamplingParams
from rollout_sglang import engine
from rollout_sglang import launch_args as engine_start
from support import served
from support.trainer import Trainer

SAID = [7, 8, 9]
"""What an environment says between two turns."""


def start(checkpoint: Path, folder: Path, precision: dict[str, Any]) -> None:
    """Brings up both."""
    here = served.Served(checkpoint, folder, precision)
    here.config = here.config.model_copy(update={"algorithm": AlgorithmConfig(routing_replay="engine")})
    arguments = engine_start._server_arguments
    engine_start._server_arguments = lambda *given: [word for word in arguments(*given) if word != "--disable-radix-cache"]
    here.engine = engine.start_engine_and_wait(here.config, here.save(folder / "engine_model"), folder)
    served._now[:] = [here]


def two_turns(prompts: list[list[int]], tokens: int = 12) -> tuple[list[TrainingSample], bool, int]:
    """(answers of two turns with the engine's log-probs and routing, whether the second turn's record begins with the first's, tokens that
    a turn after took from the prefix cache)."""
    here, sampling = served._now[0], SamplingParams(temperature=1.0, max_new_tokens=tokens)
    first = here.engine.generate(prompts, sampling)
    longer = [prompt + answer.output_ids_T + SAID for prompt, answer in zip(prompts, first, strict=True)]
    second = here.engine.generate(longer, sampling)
    found, same = [], True
    for prompt, one, two in zip(prompts, first, second, strict=True):
        logprobs = torch.tensor(one.logprobs_T + two.logprobs_T)
        sampled = [True] * len(one.output_ids_T) + [False] * len(SAID) + [True] * len(two.output_ids_T)
        same &= bool((two.routed_experts_T[: len(one.routed_experts_T)] == one.routed_experts_T).all())
        experts = extend_routing_record(one.routed_experts_T, two.routed_experts_T)
        ids = [*one.output_ids_T, *SAID, *two.output_ids_T]
        here.trainer.actor.routing.shape.check(experts, len(prompt) + len(ids), "an answer")
        found.append(
            TrainingSample(prompt, ids, rollout_logprobs=logprobs, response_mask=sampled, routed_experts=torch.from_numpy(experts))
        )
    again = here.engine._post("/generate", {"input_ids": longer[0], "sampling_params": {"max_new_tokens": 1}})
    return found, same, again["meta_info"]["cached_tokens"]


def logprobs(sequences: list[TrainingSample]) -> dict[str, Any]:
    """All sampled tokens' log-probs: the engine's, the trainer's with and without replay, and those of the trainer's model with the
    engine's products, without replay; and the share of tokens whose experts differ from the engine's in each of the three."""
    actor, trainer = served._now[0].trainer.actor, served._now[0].trainer
    found: dict[str, Any] = {"engine": torch.cat([sequence.rollout_logprobs for sequence in sequences])}

    def score(name: str) -> None:
        with actor.routing.collect_stats(sequences) as watch:
            found[name] = torch.cat(actor.compute_logprobs(sequences)[0])
        found[f"{name} differs"] = watch.gather_metrics()["router/differs"]

    score("replay")
    with actor.routing.disable_replay():
        score("free")
        with emulate_engine(trainer.model, trainer.collect_named_tensors(), trainer.contract.activation_format):
            score("emulated")
    return found


def dense_mismatch(checkpoint: Path, precision: dict[str, Any], sequences: list[TrainingSample]) -> float:
    """Mean |dlogp| of the same tokens between a dense model and itself with its engine's products, which are the engine's bits."""
    trainer = Trainer(checkpoint, precision)
    plain = [replace(sequence, routed_experts=torch.empty(0)) for sequence in sequences]
    own = torch.cat(trainer.actor.compute_logprobs(plain)[0])
    with emulate_engine(trainer.model, trainer.collect_named_tensors(), trainer.contract.activation_format):
        return float((torch.cat(trainer.actor.compute_logprobs(plain)[0]) - own).abs().mean())
