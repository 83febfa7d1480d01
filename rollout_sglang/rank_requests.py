"""Requests of a sync to the code inside every engine rank (`rollout_sglang.rank_handler`), independent of how they are transferred."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_rl.rollout.engine import Places, ServedReport
from parallel.chunking import Chunk
from parallel.shards import NamedRect
from parallel.transport.base import Link
from rollout_sglang.rank_handler import PENDING

_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.5


class RankRequests:
    """The sync methods of `megatron_rl.rollout.engine.Engine`. A subclass implements the transfer of requests to the ranks."""

    def _ask_ranks(self, request: dict[str, Any]) -> list[dict[str, str]]:
        """Send a request to every engine rank and return their answers in rank order. Raise RunError if a rank failed."""
        raise NotImplementedError

    def connect(self, link: Link, chunks: Sequence[Chunk], staged: bool) -> None:
        ranks: dict[str, list[Any]] = {}
        for chunk in chunks:
            ranks.setdefault(str(chunk.target), []).append(chunk.to_json())
        self._ask_ranks({"verb": "connect", "link": asdict(link), "staged": staged, "ranks": ranks})

    def disconnect(self) -> None:
        self._ask_ranks({"verb": "disconnect"})

    def start_receiving(self, hashing: bool, places: Places | None = None) -> None:
        self._ask_ranks({"verb": "start", "hashing": hashing, "places": places and {str(rank): own for rank, own in places.items()}})

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        return _list_digests(self._ask_ranks({"verb": "finish", "hashing": hashing}))

    def start_rereading(self) -> None:
        self._ask_ranks({"verb": "reread"})

    def finish_rereading(self) -> dict[int, list[str]]:
        seconds = _FIRST_POLL_SECONDS
        while True:
            answers = self._ask_ranks({"verb": "reread digests"})
            if not any(PENDING in answer for answer in answers):
                return _list_digests(answers)
            time.sleep(seconds)  # running requests share the engine's time with these polls
            seconds = min(2 * seconds, _LONGEST_POLL_SECONDS)

    def digest_rects(self, rects_by_rank: Mapping[int, Sequence[NamedRect]]) -> dict[int, list[str]]:
        ranks = {str(rank): [[name, *rect] for name, rect in named_rects] for rank, named_rects in rects_by_rank.items()}
        answers = self._ask_ranks({"verb": "digest", "ranks": ranks})
        return {rank: [answers[rank][str(index)] for index in range(len(named_rects))] for rank, named_rects in rects_by_rank.items()}

    def account_for_tensors(self) -> list[ServedReport]:
        answers = self._ask_ranks({"verb": "served"})
        return [
            ServedReport(wrong=rank["wrong"]) if "wrong" in rank else ServedReport(int(rank["derived"]), int(rank["constant"]))
            for rank in answers
        ]

    def tap(self) -> None:
        """Start recording the outputs of operators on every rank."""
        self._ask_ranks({"verb": "tap"})

    def untap(self, folder: Path) -> list[Path]:
        """Stop recording. Each rank writes its recording (`rollout_sglang.activation_hooks`) into this existing folder on the engine's
        machine. Return the files."""
        return [Path(answer["file"]) for answer in self._ask_ranks({"verb": "untap", "folder": str(folder)})]


def _list_digests(answers: list[dict[str, str]]) -> dict[int, list[str]]:
    return {rank: [digests[str(index)] for index in range(len(digests))] for rank, digests in enumerate(answers)}
