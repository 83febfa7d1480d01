"""The command `rehearse`: some ranks of a run on a GPU without data."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.reading import parse_number
from megatron_rl.cost.hardware import Cluster
from megatron_rl.cost.weights import count_engine_weights, list_extreme_stages
from megatron_rl.cost.workload import Candidate, Workload
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_config
from megatron_rl.preflight import pin_model
from parallel.layout import Layout


@dataclass(frozen=True)
class RehearseOptions:
    nodes: int | None
    gpus_per_node: int
    gpu: str
    ranks: str | None
    json: Path | None


def run_rehearsal(config: Config, options: RehearseOptions) -> bool:
    """Print the report and write it to a file if requested. Raise UserError for everything that `plan` refuses. Return whether all ranks
    run, take the planned memory and wait in no layer."""
    config = pin_model(config)
    job = Workload.from_config(config, read_config(config.model.folder))
    candidate = Candidate.from_config(config)
    cluster = Cluster.from_options(options.nodes, options.gpus_per_node, options.gpu, candidate.gpus)
    candidate.check_on(cluster, job)
    ranks = choose_ranks(options.ranks, job, candidate.train)
    install_device()

    from megatron_rl.rehearsal.engine_rank import rehearse_engine
    from megatron_rl.rehearsal.job import rehearse_rank
    from megatron_rl.rehearsal.report import make_report, print_report

    with ThreadPoolExecutor(1) as thread:
        planned = count_engine_weights(job, candidate.rollout_tp, candidate.rollout_ep)
        in_engine = thread.submit(rehearse_engine, config, planned, cluster.gpu)
        reports = [make_report(rehearse_rank(config, rank, cluster.gpu), job, cluster) for rank in ranks]
        engine = in_engine.result()
    print_report(reports, engine)
    if options.json is not None:
        found: dict[str, Any] = {"trainer": [report.as_json() for report in reports], "engine": [asdict(report) for report in engine]}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return all(report.passes for report in reports) and all(report.passes for report in engine)


def install_device() -> None:
    """Make this process behave as if it had a GPU and a trainer's libraries, before torch is imported."""
    from megatron_rl.rehearsal.device_guard import load

    load()
    from megatron_rl.rehearsal import fake_cuda

    fake_cuda.install()


def choose_ranks(text: str | None, job: Workload, layout: Layout) -> list[int]:
    """Return the ranks of a list such as `0,7,last`, by default the first rank of the last, the first, the second and the fullest stages. A
    rank of the last stage is always included and comes first, because only the last stage knows the loss."""
    width = layout.world_size // layout.pp
    last = (layout.pp - 1) * width
    if text is None:
        return list(dict.fromkeys((last, 0, min(width, last), *(stage * width for stage in list_extreme_stages(job, layout)))))
    ranks = []
    for word in text.split(","):
        number = layout.world_size - 1 if word.strip() == "last" else parse_number(word, 0, layout.world_size - 1)
        if number is None:
            rule = f"{word!r:.80} is not one of the {layout.world_size} ranks"
            raise UserError("--ranks", text, rule, "give numbers from 0, or last, as in 0,7,last")
        ranks.append(number)
    in_order = sorted(dict.fromkeys(ranks), key=lambda rank: rank < last)
    return in_order if in_order[0] >= last else [last, *in_order]
