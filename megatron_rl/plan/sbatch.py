"""An sbatch file for a plan, from the template launch/slurm/plan.sbatch.j2."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined

from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from megatron_rl.plan.command import Plan, Request

TEMPLATE = Path(__file__).parents[2] / "launch" / "slurm" / "plan.sbatch.j2"


def write_sbatch(plan: Plan, request: Request) -> str:
    """The text of the file. Raises UserError where the template is missing, as in an installed wheel."""
    if not TEMPLATE.is_file():
        raise UserError("--sbatch", None, f"needs {TEMPLATE}", "run it from a checkout of the project")
    candidate, cluster = plan.chosen.candidate, plan.cluster
    template = Environment(undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True).from_string(TEMPLATE.read_text())
    given = [*request.overrides, *([] if plan.configured else candidate.overrides())]
    return template.render(
        name=plan.job.config.model.path.name,
        nodes=cluster.nodes,
        gpus_per_node=cluster.gpus_per_node,
        trainer_nodes=-(-candidate.train.world_size // cluster.gpus_per_node),
        ranks_per_node=min(candidate.train.world_size, cluster.gpus_per_node),
        placement=candidate.placement,
        words=candidate.words(),
        engines=candidate.engine_words(),
        gpu=cluster.gpu.name,
        arguments=" ".join(shlex.quote(word) for word in (str(request.path), *given)),
    )
