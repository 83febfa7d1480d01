"""The requests of a sync to the code inside every engine rank (`rollout_sglang.rank_handler`), whichever way they travel there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from parallel.chunking import Chunk
from parallel.shards import Rect
from parallel.transport.base import Link


class RankRequests:
    """The receiving half of `megatron_rl.rollout.engine.Engine`; a subclass says how a request reaches the ranks."""

    def _ask_ranks(self, request: dict[str, Any]) -> list[dict[str, str]]:
        """Sends a request to every engine rank; their answers in rank order. Raises where a rank has none."""
        raise NotImplementedError

    def connect(self, link: Link, chunks: Sequence[Chunk], staged: bool) -> None:
        ranks: dict[str, list[Any]] = {}
        for chunk in chunks:
            ranks.setdefault(str(chunk.target), []).append(chunk.to_json())
        self._ask_ranks({"verb": "connect", "link": asdict(link), "staged": staged, "ranks": ranks})

    def disconnect(self) -> None:
        self._ask_ranks({"verb": "disconnect"})

    def start_receiving(self, hashing: bool) -> None:
        self._ask_ranks({"verb": "start", "hashing": hashing})

    def finish_receiving(self, hashing: bool) -> dict[int, list[str]]:
        answers = self._ask_ranks({"verb": "finish", "hashing": hashing})
        return {rank: [digests[str(index)] for index in range(len(digests))] for rank, digests in enumerate(answers)}

    def digest_rects(self, wanted: Mapping[int, Sequence[tuple[str, Rect]]]) -> dict[int, list[str]]:
        ranks = {str(rank): [[name, rect.row, rect.col, rect.rows, rect.cols] for name, rect in rects] for rank, rects in wanted.items()}
        answers = self._ask_ranks({"verb": "digest", "ranks": ranks})
        return {rank: [answers[rank][str(index)] for index in range(len(rects))] for rank, rects in wanted.items()}

    def tap(self) -> None:
        """From now on every rank records what its operators give."""
        self._ask_ranks({"verb": "tap"})

    def untap(self, folder: Path) -> list[Path]:
        """Ends that; each rank writes what it recorded (`rollout_sglang.activation_hooks`) into this existing folder of the engine's
        machine."""
        return [Path(rank["file"]) for rank in self._ask_ranks({"verb": "untap", "folder": str(folder)})]
