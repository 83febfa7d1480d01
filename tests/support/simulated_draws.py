"""Engines that report right log-probs but may draw other tokens, simulated with a model of bigrams, and the checks of their draws."""

from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from megatron_rl.batch.draws import mark_draws
from megatron_rl.batch.kept_tokens import make_kept_tokens, pad_kept_tokens
from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.diagnosis.draws import DrawCheck
from megatron_rl.mcore.passes import reduce
from megatron_rl.mcore.passes.draws import DrawRecord, Draws
from megatron_rl.mcore.passes.logprobs import Targets
from megatron_rl.rollout.engine import hash_seed
from rollout_sglang.hooks.seeded_sampling import find_kept_tokens
from support import faulty_draws
from support.faulty_draws import TEMPERATURE

VOCABULARY, PROMPT = 200, 4
FILTERS = {"top_k": 50, "top_p": 0.95, "min_p": 0.02}
FILTERED = ("kept set off by one", "reported set off by one", "min-p ignored")
"""Faults of engines with `FILTERS`."""


def make_logits():
    """Return the logits of each token after each other, before the temperature: of a language, a few tokens are likely."""
    generator = torch.Generator().manual_seed(3)
    common = -1.1 * torch.arange(1, VOCABULARY + 1).log()
    return common + 1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)


class SimulatedRun:
    """Steps of `count` completions of `length` tokens, in groups of eight."""

    def __init__(self, fault, count, length, seeded, exact=True):
        self.fault, self.count, self.length, self.seeded, self.told = fault, count, length, seeded, []
        self.filters = FILTERS if fault in FILTERED or fault == "filters" else {}
        rollout = {"temperature": TEMPERATURE, **self.filters}
        sync = {"on_mismatch": "stop" if seeded else "warn"}
        config = Config.model_validate({"model": {"path": Path("m")}, "rollout": rollout, "sync": sync})
        self.check = DrawCheck(config, exact, self.told.append)
        self.logits = make_logits()

    def step(self, number):
        """Sample and check a step. Return its metrics."""
        faulty_draws.forget()
        seeds = torch.tensor([hash_seed(number, sample) for sample in range(self.count)])
        tokens, kept = torch.zeros(self.count, PROMPT + self.length, dtype=torch.long), [[] for _ in range(self.count)]
        for position in range(PROMPT - 1, PROMPT + self.length - 1):
            probs = torch.softmax(self.logits[tokens[:, position]] / TEMPERATURE, -1)
            for row in range(self.count) if self.filters else ():
                ids = self.filter(probs[row])
                kept[row].append(ids.tolist())
                probs[row] = torch.zeros(VOCABULARY).index_copy(0, ids, probs[row, ids])
            probs /= probs.sum(-1, keepdim=True)
            tokens[:, position + 1] = faulty_draws.draw(self.fault, probs, seeds, torch.full((self.count,), position))
        samples = [
            TrainingSample(
                row[:PROMPT],
                row[PROMPT:],
                number=sample,
                kept_tokens=make_kept_tokens(kept[sample]) if self.filters else None,
                seeds=torch.tensor([self.length, int(seed)]) if self.seeded else torch.empty(0, dtype=torch.int64),
            )
            for sample, (row, seed) in enumerate(zip(tokens, seeds, strict=True))
        ]
        with ExitStack() as stack:
            for owner, name, result in (
                (reduce.parallel_state, "get_tensor_model_parallel_world_size", lambda: 1),
                (reduce.parallel_state, "get_tensor_model_parallel_rank", lambda: 0),
                (reduce, "sum_stage", lambda values: values),
                (reduce, "gather_from_stage", lambda value, kind: [value]),
                (reduce, "gather_from_shards", lambda value, kind: [value]),
            ):
                stack.enter_context(mock.patch.object(owner, name, result))
            return self.check.check(self.record(samples, number), samples, 0.0)

    def filter(self, probs):
        bounds = self.filters["top_p"], self.filters["top_k"], 0.0 if self.fault == "min-p ignored" else self.filters["min_p"]
        ids = find_kept_tokens(probs, *bounds)
        return ids[:-1] if self.fault == "reported set off by one" and len(ids) > 1 else ids

    def record(self, samples, step):
        """Return what the trainer's passes record of the samples."""
        mark_draws(samples, step)
        record, first = DrawRecord(), 0
        for sample in samples:
            inputs, places = sample.ids[PROMPT - 1 : -1].long(), first + sample.target_positions
            kept = sample.kept_tokens
            padded = None if kept is None else pad_kept_tokens(kept, int(kept.counts.max()))
            targets = Targets(sample.response_ids.long(), TEMPERATURE, padded, Draws.choose(sample.draws, places, record))
            targets[0 : self.length].record_draws(self.logits[inputs])
            first += sample.length - 1
        return record


def count_until_told(fault, most=1 << 20, length=128):
    """Return (tokens, metric) of the first test that fails, with steps of 64 completions and draws that cannot be repeated."""
    run = SimulatedRun(fault, 64, length, seeded=False)
    for number in range(most // (64 * length)):
        run.step(number)
        if run.told:
            return (number + 1) * 64 * length, [line.split()[0].rstrip(":") for line in run.told]
    return None, []


if __name__ == "__main__":
    np.seterr(all="raise", under="ignore")
    for name in ("", "filters", "temperature twice", "biased token", "greedy", "one seed", "one number", "penalty", "banned token",
                 "previous distribution", *FILTERED):  # fmt: skip
        print(f"{name or 'none':26}", *count_until_told(name, 1 << 17))
