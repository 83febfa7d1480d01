"""The engine's side of `weight_sync.py`: processes that answer a sync with the code that runs inside SGLang's scheduler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from weight_sync_baselines import BenchSetup, make_contract, make_flat_tensors

from megatron_rl.config.sync import Running
from megatron_rl.precision.contract import PrecisionContract
from parallel.digest import make_stored_tensors
from parallel.sglang_shards import build_engine_shards
from parallel.shards import Shard
from rollout_sglang.rank_handler import RankHandler
from rollout_sglang.rank_requests import RankRequests

_CACHE = SimpleNamespace(size=0, available_size=int)
"""A KV cache that holds nothing."""


class PipeEngine(RankRequests):
    """The engine that `WeightSync` talks to: forwards its requests to the engine ranks' processes. It serves nothing."""

    def __init__(self, pipes: Sequence[Connection], case: str, fp8: bool) -> None:
        self._pipes, self._case, self._fp8 = pipes, case, fp8

    def pause(self, running: Running) -> None: ...
    def admit(self) -> None: ...
    def resume(self) -> None: ...
    def begin_sync(self) -> None: ...
    def end_sync(self, version: int) -> None: ...

    def _ask_ranks(self, request: dict[str, Any]) -> list[dict[str, str]]:
        for pipe in self._pipes:
            pipe.send((self._case, self._fp8, request))
        answers = [pipe.recv() for pipe in self._pipes]
        for _, error in answers:
            if error:
                raise RuntimeError(error)
        return [answer for answer, _ in answers]


def serve_engine_rank(pipe: Connection, setup: BenchSetup, rank: int) -> None:
    """Answer requests like the hook in SGLang's scheduler process; on CPUs for an FP8 and a BF16 engine of the same model."""
    torch.set_num_threads(1)
    shards = build_engine_shards(setup.model, setup.rollout_tp)[rank]
    with torch.device(setup.device):
        tensors = {fp8: make_empty_tensors(shards, make_contract(fp8)) for fp8 in setup.precisions()}
        if setup.device == "cpu":
            tensors[True] |= make_flat_tensors(setup)
    handlers = defaultdict[str, RankHandler](RankHandler)  # this process plays several engines
    while True:
        try:
            case, fp8, request = pipe.recv()
        except EOFError:
            return
        try:
            model = SimpleNamespace(named_parameters=tensors[fp8].items)  # a torch module takes no names with dots
            pipe.send((handlers[case].answer(request, rank, SimpleNamespace(model=model, token_to_kv_pool_allocator=_CACHE)), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))


def make_empty_tensors(shards: Sequence[Shard], contract: PrecisionContract) -> dict[str, torch.Tensor]:
    """Return an engine rank's tensors, every byte written: every page is there before anything is measured."""
    tensors = make_stored_tensors(shards, contract.format_of)
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(1)
    return tensors
