"""The launcher's environment variables: which rank this process is, of how many."""

import os
from collections.abc import Mapping
from typing import NamedTuple

from megatron_rl.config.base import MAX_RANKS
from megatron_rl.config.reading import parse_number
from megatron_rl.errors import UserError

_LIMITS = {
    "WORLD_SIZE": (1, MAX_RANKS),
    "RANK": (0, MAX_RANKS - 1),
    "LOCAL_WORLD_SIZE": (1, MAX_RANKS),
    "LOCAL_RANK": (0, MAX_RANKS - 1),
    "MASTER_PORT": (1, 65535),
}
_FIX = "start the ranks with torchrun, or unset it"


class Launch(NamedTuple):
    """What the launcher says. The defaults are those of a process that no launcher started."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    is_launched: bool = False
    """Whether a launcher started this process, even if alone."""


def read_launch(joins: bool = False, environment: Mapping[str, str] = os.environ) -> Launch:
    """Return what the variables of torchrun say. An empty variable counts as not set. Raise UserError for values that torch would wait on
    or fail on, and, if this process `joins` other ranks, for variables that are missing."""
    texts = {name: text for name in (*_LIMITS, "MASTER_ADDR") if (text := environment.get(name, "").strip())}
    numbers: dict[str, int] = {}
    mistakes: list[UserError] = []
    for name in (name for name in _LIMITS if name in texts):
        try:
            numbers[name] = read_number(name, texts[name], *_LIMITS[name])
        except UserError as error:
            mistakes.append(error)
    size, is_launched = numbers.get("WORLD_SIZE", 1), "RANK" in texts
    given = "RANK" if is_launched else "WORLD_SIZE"
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT") if joins and (is_launched or size > 1) else ():
        if name not in texts:
            mistakes.append(UserError(name, None, f"is not set, although {given} is", f"start the ranks with torchrun, or unset {given}"))
    for rank, ranks in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers.get(rank, 0) >= numbers.get(ranks, MAX_RANKS):
            mistakes.append(UserError(rank, numbers[rank], f"must be less than {ranks} ({numbers[ranks]})", _FIX))
    if mistakes:
        raise UserError.join(mistakes)
    return Launch(numbers.get("RANK", 0), size, numbers.get("LOCAL_RANK", 0), numbers.get("LOCAL_WORLD_SIZE", size), is_launched)


def read_number(name: str, text: str, low: int, high: int) -> int:
    """Return the number that a variable holds. Raise UserError if it is not an integer from `low` to `high`."""
    number = parse_number(text, low, high)
    if number is None:
        raise UserError(name, text.strip(), f"must be an integer from {low} to {high}", _FIX)
    return number
