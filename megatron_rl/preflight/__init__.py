"""The preflight: every rule that needs no process, in one list, for all commands. Imports without torch.

A rule is a function with the decorator `rule`, which says what the rule is about (`Needs`) and puts it into `RULES`. It raises UserError,
so field, value, rule and fix are written once, and every command that knows what a rule needs refuses the same mistake with the same
line. Rules on the fields of one section alone are pydantic's, in `megatron_rl.config`.

    settings   the configuration alone
    layouts    model, trainer's and engines' layouts, launch
    machine    what this machine and its nodes have
    files      weights, problems, the user's own code; `teacher`: all of the teacher's; `resumed_run`: the run that goes on

`pin_model` comes before them, for a model of the hub.
"""

from megatron_rl.preflight import settings, layouts, machine, files, teacher, resumed_run  # noqa: I001 - in the order in which rules are checked
from megatron_rl.preflight.hub_model import pin_model
from megatron_rl.preflight.rule import (
    EVAL, EVAL_MODEL, GRAPH, LAYOUTS, PLAN, RULES, TRAIN, Facts, Needs, check, check_on_rank_0, check_run,
    find_mistakes,
)  # fmt: skip
