"""Objects that exist on rank 0 only: their results and errors reach every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from megatron_rl.distributed import Rank0, share_before_start
from megatron_rl.errors import RunError


def refuse(*_: Any) -> Any:
    raise RunError(f"rank {dist.get_rank() if dist.is_initialized() else 0} refuses")


def outcome(use: Callable[[], Any]) -> Any:
    """Return the result of `use`, or its error message."""
    try:
        return use()
    except (RunError, LookupError) as error:
        return str(error) or type(error).__name__


def use_in_every_way() -> dict[str, Any]:
    dist.is_initialized() or dist.init_process_group("gloo")
    rank, local = dist.get_rank(), list[int]()
    held = Rank0(lambda: [rank])
    held.run_local(lambda numbers: (local.append(rank), numbers.append(7)))
    return {
        "made": outcome(lambda: Rank0(refuse)),
        "run": held.run(lambda numbers: sum(numbers)),
        "error": outcome(lambda: held.run(refuse)),
        "after an error": held.run(len),
        "local": local,
        "local error": outcome(lambda: held.run_local(refuse)),
        "value": outcome(lambda: held.value),
        "before the start": share_before_start("made", lambda: rank, dist.distributed_c10d._get_default_store()),
        "error before the start": outcome(lambda: share_before_start("failed", refuse, dist.distributed_c10d._get_default_store())),
        "of another": Rank0(lambda: len(held.value)).run(lambda count: count + 1),
    }


def test_one_process_is_rank_0():
    held = Rank0(lambda: [1])
    held.run_local(lambda numbers: numbers.append(2))
    assert held.value == [1, 2] and held.run(sum) == 3
    for use in (lambda: Rank0(refuse), lambda: held.run(refuse), lambda: held.run_local(refuse)):
        with pytest.raises(RunError, match="rank 0 refuses"):
            use()


def test_results_and_errors_of_rank_0_reach_every_rank(worlds):
    first, second = worlds(2).call(use_in_every_way)
    shared = {"made": "rank 0 refuses", "run": 7, "error": "rank 0 refuses", "after an error": 2, "of another": 3}
    shared |= {"before the start": 0, "error before the start": "rank 0 refuses"}
    assert first == shared | {"local": [0], "local error": "rank 0 refuses", "value": [0, 7]}
    assert second == shared | {"local": [], "local error": None, "value": "list index out of range"}
