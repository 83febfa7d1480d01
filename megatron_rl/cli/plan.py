"""The command `plan`: a dry run of a configuration on a cluster."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.planner.plan import PlanOptions, as_json, make_plan
from megatron_rl.planner.sbatch import render_sbatch
from megatron_rl.planner.tables import print_plan
from megatron_rl.preflight import pin_model


def run_plan(config: Config, options: PlanOptions) -> None:
    """Print the plan and write the files that were asked for.

    Raise UserError where nothing fits, before anything is printed; where only the configured layout does not work, after the plan of
    the best one.
    """
    plan = make_plan(pin_model(config), options)
    print_plan(plan)
    if options.json is not None:
        _write(options.json, json.dumps(as_json(plan), indent=2) + "\n", "--json")
    if options.sbatch is not None:
        _write(options.sbatch, render_sbatch(plan, options), "--sbatch")
    if plan.refusal is not None:
        raise plan.refusal


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise UserError(option, str(path), f"cannot be written ({error.strerror})", "name another file") from None
