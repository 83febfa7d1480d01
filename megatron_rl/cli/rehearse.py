"""The command `rehearse`: some ranks of a run, on a GPU without data."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.cost.workload import Candidate, Workload
from megatron_rl.cost.hardware import Cluster
from megatron_rl.cost.weights import count_engine_weights
from megatron_rl.preflight import LAYOUTS, PLAN, check, pin_model
from parallel.layout import Layout


@dataclass(frozen=True)
class RehearseOptions:
    """The options of the command line."""

    nodes: int | None
    gpus_per_node: int
    gpu: str
    ranks: str | None
    json: Path | None


def run_rehearsal(config: Config, options: RehearseOptions) -> bool:
    """Print the report and write it; return whether all ranks run and take the memory that the plan says, and the kernels are called as the
    libraries have them that are installed. Raise UserError for what `plan` refuses, too."""
    config = pin_model(config)
    job = Workload.from_config(config, read_config(config.model.folder))
    candidate = Candidate.from_config(config)
    nodes = options.nodes if options.nodes is not None else -(-candidate.gpus // max(options.gpus_per_node, 1))
    cluster = Cluster.from_options(nodes, options.gpus_per_node, options.gpu)
    check(candidate.facts(job, cluster), PLAN | LAYOUTS, about=LAYOUTS)
    if candidate.gpus > cluster.gpus:
        raise UserError("train.layout", None, f"needs {candidate.gpus} GPUs, {cluster} have {cluster.gpus}", "give more --nodes")
    ranks = choose_ranks(options.ranks, candidate.train)

    from megatron_rl.rehearsal.no_device import load

    load()
    from megatron_rl.rehearsal import fake_cuda

    fake_cuda.install()
    from megatron_rl.rehearsal.engine_rank import rehearse_engine
    from megatron_rl.rehearsal.job import rehearse_rank
    from megatron_rl.rehearsal.report import make_report, print_report
    from megatron_rl.rehearsal.signatures import compare_installed

    with ThreadPoolExecutor(1) as thread:
        planned = count_engine_weights(job, candidate.rollout_tp, candidate.rollout_ep)
        in_engine = thread.submit(rehearse_engine, config, planned, cluster.gpu)
        in_libraries = thread.submit(compare_installed)
        reports = [make_report(rehearse_rank(config, rank, cluster.gpu), job, cluster) for rank in ranks]
        engine, differing = in_engine.result(), in_libraries.result()
    print_report(reports, engine, differing)
    if options.json is not None:
        found: dict[str, Any] = {"trainer": [report.as_json() for report in reports], "engine": [asdict(report) for report in engine]}
        found["libraries"] = differing or []
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    return not differing and all(report.passes for report in reports) and all(report.passes for report in engine)


def choose_ranks(text: str | None, layout: Layout) -> list[int]:
    """Return the ranks that `text` names, such as `0,7,last`; by default the first of every kind of pipeline stage: last, first, second.
    One of the last stage comes first, since it alone knows the loss."""
    width = layout.world_size // layout.pp
    last = (layout.pp - 1) * width
    if text is None:
        return list(dict.fromkeys((last, 0, min(width, last))))
    ranks = []
    for word in text.split(","):
        number = str(layout.world_size - 1) if word.strip() == "last" else word.strip()
        if not number.isdigit() or int(number) >= layout.world_size:
            raise UserError("--ranks", text, f"{word!r} is no rank of {layout.world_size}", "give numbers from 0, and last, as in 0,7,last")
        ranks.append(int(number))
    in_order = sorted(dict.fromkeys(ranks), key=lambda rank: rank < last)
    return in_order if in_order[0] >= last else [last, *in_order]
