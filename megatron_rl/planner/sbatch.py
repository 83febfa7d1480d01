"""An sbatch file for a plan, from the template launch/slurm/plan.sbatch.j2."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined

from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from megatron_rl.planner.plan import Plan, PlanOptions

TEMPLATE = Path(__file__).parents[2] / "launch" / "slurm" / "plan.sbatch.j2"


def render_sbatch(plan: Plan, options: PlanOptions) -> str:
    """Return the file's text: the number of nodes, and the call of launch/slurm/PLACEMENT.sbatch with the plan's layouts.

    Raise UserError where the template is missing, as in an installed wheel.
    """
    if not TEMPLATE.is_file():
        raise UserError("--sbatch", None, f"needs {TEMPLATE}", "run it from a checkout of the project")
    candidate, cluster = plan.chosen.candidate, plan.cluster
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True).from_string(TEMPLATE.read_text())
    return template.render(
        name=plan.job.config.model.name,
        cluster=cluster,
        ranks_per_node=min(candidate.train.world_size, cluster.gpus_per_node),
        placement=candidate.placement,
        layout=candidate.describe(),
        engines=candidate.describe_engines(),
        engine_nodes=candidate.engine_nodes(cluster),
        problem=candidate.find_launch_problem(plan.job, cluster),
        arguments=shlex.join((str(options.path), *options.overrides, *candidate.overrides(plan.job.config))),
    )
