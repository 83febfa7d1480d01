"""Preflight: all checks that need no running process, in one list that is shared by all commands. Does not import torch.

A check is a function with the decorator `rule`, which states what the check needs (`Needs`) and appends it to `RULES`. It raises UserError
(field, value, rule, fix), so all commands that have what the check needs refuse a mistake with the same line. Checks on the fields of a
single section are pydantic validators in `megatron_rl.config`.

    settings     the configuration alone
    layouts      model, trainer layout, engine layout, number of ranks
    rank_sums    what `precision.reduction = "ranks"` does not support
    machine      devices and libraries of this machine and its nodes
    files        weights, data and user code; `teacher`: the teacher; `resumed_run`: the run to resume
"""

from megatron_rl.preflight import settings, layouts, rank_sums, machine, files, teacher, resumed_run  # noqa: I001 - the order of the checks
from megatron_rl.preflight.rule import (
    EVAL, EVAL_MODEL, GRAPH, LAYOUTS, PLAN, RULES, TRAIN, Facts, Needs, check, check_on_rank_0, check_run, find_mistakes, pin_model,
)  # fmt: skip
