"""The command `plan`: a dry run of a configuration on a cluster."""

import json
import os
import re
import shlex
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.planner.plan import Plan, PlanOptions, as_json, make_plan
from megatron_rl.planner.tables import print_plan
from megatron_rl.preflight import pin_model

_TEMPLATE = Path(__file__).parents[2] / "launch" / "slurm" / "plan.sbatch.j2"


def run_plan(config: Config, options: PlanOptions) -> None:
    """Print the plan and write the requested files. Raise UserError before anything is printed if no layout fits, or after the best
    layout's plan if only the configured layout fails."""
    plan = make_plan(pin_model(config), options)
    print_plan(plan)
    if options.json is not None:
        _write(options.json, json.dumps(as_json(plan), indent=2) + "\n", "--json")
    if options.sbatch is not None:
        _write(options.sbatch, _render_sbatch(plan, options), "--sbatch")
    if plan.refusal is not None:
        raise plan.refusal


def _render_sbatch(plan: Plan, options: PlanOptions) -> str:
    """Return a batch file that calls launch/slurm/PLACEMENT.sbatch with the plan's layouts. Raise UserError without a checkout."""
    if not _TEMPLATE.is_file():
        raise UserError("--sbatch", None, f"needs {_TEMPLATE}", "run it from a checkout of the project")
    candidate, cluster = plan.chosen.candidate, plan.cluster
    environment = Environment(undefined=StrictUndefined, finalize=quote, keep_trailing_newline=True, trim_blocks=True)
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        name=Path(plan.job.config.model.name),
        cluster=cluster,
        ranks_per_node=min(candidate.train.world_size, cluster.gpus_per_node),
        placement=candidate.placement,
        layout=candidate.describe(),
        engines=candidate.describe_engines(),
        engine_nodes=candidate.engine_nodes(cluster),
        problem=candidate.find_launch_problem(plan.job, cluster),
        arguments=(str(options.path), *options.overrides, *candidate.overrides(plan.job.config)),
    )


def quote(value: object) -> str:
    """Return a value as it may stand in a generated shell script: a tuple as quoted words of a command, a path as one word of letters,
    digits, and `._+-`, for an `#SBATCH` option, and anything else as one line for a comment. The template applies it to every value."""
    if isinstance(value, tuple):
        return shlex.join(value)
    if isinstance(value, Path):
        return re.sub(r"[^\w.+-]", "_", value.name, flags=re.ASCII) or "megatron-rl"
    return "".join(character if character.isprintable() else "_" for character in str(value))


def _write(path: Path, text: str, option: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.fsencode(text))
    except OSError as error:
        raise UserError(option, str(path), f"cannot be written ({error.strerror})", "name another file") from None
