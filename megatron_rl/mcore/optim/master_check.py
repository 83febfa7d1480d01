"""Whether the weights that the trainer computes with, and sends to the engines, were made from its masters. The proof of a sync compares
the weights of both sides, so it does not see a weight that is stale on both."""

from collections.abc import Iterator
from typing import Any

import torch

from megatron_rl.distributed import gather_from_ranks, get_rank, raise_on_all_ranks
from megatron_rl.errors import RunError
from megatron_rl.mcore.base.master_slices import flatten_chained, iter_stepped
from megatron_rl.mcore.base.names import ModelChunks, get_model_chunks, global_name
from megatron_rl.mcore.optim.buckets import finish_gathers
from megatron_rl.mcore.optim.quantizing_optimizer import is_quantized
from parallel.digest import digest
from parallel.shards import Rect

VALUES, MOST_TURNS = 1 << 24, 64
"""Values that a rank recomputes per step, unless all weights would then take more steps than `MOST_TURNS`."""


def check_masters(model: ModelChunks, optimizer: Any, step: int) -> None:
    """Recompute a share of this rank's weights from the FP32 masters, in turn from step to step, and compare it with the live weights and
    those of other replicas. Collective. Raise RunError on all ranks for the first parameter that differs, with rank and place."""
    finish_gathers(model)
    chunks = get_model_chunks(model)
    names = {id(value): global_name(chunk, name) for chunk in chunks for name, value in chunk.named_parameters()}
    wrong = next(filter(None, [_check_part(part, step, names) for part in flatten_chained(optimizer)]), "")
    raise_on_all_ranks(RunError(f"{wrong} (trainer rank {get_rank()})") if wrong else None)


def _check_part(part: Any, step: int, names: dict[int, str]) -> str:
    """Return what is wrong with the weights of an optimizer that has their turn, or "". Collective over its replicas."""
    stepped = list(iter_stepped(part))
    values = sum(parameter.numel() for parameter, _ in stepped) // part.data_parallel_group.size()
    turns = min(max(-(-values // VALUES), 1), MOST_TURNS)
    own = [(names[id(parameter)], parameter.data, master) for parameter, master in stepped[step % turns :: turns]]
    chosen = {id(parameter) for parameter, _ in stepped[step % turns :: turns] if is_quantized(parameter)}
    found = [*part.find_unmade(chosen), *_find_unequal(own)]
    whole = [digest(weight.view(1, -1), Rect(0, 0, 1, weight.numel())) for _, weight, _ in own]
    for other in gather_from_ranks(whole, list[str], part.data_parallel_group):
        found += [f"{own[number][0]}: replicas hold other weights" for number, each in enumerate(other) if each != whole[number]][:1]
    return next(iter(found), "")


@torch.no_grad()
def _find_unequal(own: list[tuple[str, torch.Tensor, Any]]) -> Iterator[str]:
    """Yield the unquantized weights whose values are not those of the master."""
    for name, weight, master in own:
        live = weight.view(-1)[master.start : master.start + master.values.numel()]
        if weight.itemsize > 1 and bool((different := live != master.values.to(weight.dtype)).any()):
            row, column = divmod(master.start + int(different.nonzero()[0]), weight.shape[-1])
            yield f"{name} was not made from its FP32 master, first at row {row}, column {column}"
