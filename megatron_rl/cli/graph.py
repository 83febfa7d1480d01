"""The command `graph`: starts trainer and engine as a run would, reads and shows both precision graphs, and stops everything."""

import json
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from megatron_rl.cli.run_settings import check_output_files
from megatron_rl.config import Config
from megatron_rl.diagnosis.graph_check import GraphComparison, read_training_graph
from megatron_rl.distributed import Rank0
from megatron_rl.hf.files import read_config
from megatron_rl.precision.graph.render import draw_svg, print_graphs
from megatron_rl.preflight import GRAPH, check_run, pin_model
from megatron_rl.training.policies import load_actor
from megatron_rl.training.start import start_empty_engines, start_trainer
from parallel.layout import Layout


def show_graph(config: Config, svg: Path | None, json_file: Path | None) -> bool:
    """Print both graphs and their differences. Return True if there are no differences. Under torchrun, every rank calls this. Raise
    UserError before anything heavy starts, RunError if trainer or engine cannot be started or read."""
    check_output_files({"--svg": svg, "--json": json_file})
    config = pin_model(config)
    layout = check_run(config, GRAPH)
    with ExitStack() as resources:
        comparison = _read(config, layout, resources)
    return comparison.run(lambda comparison: _report(comparison, svg, json_file), bool)


def _read(config: Config, layout: Layout, resources: ExitStack) -> Rank0[GraphComparison]:
    """Return both live graphs."""
    start_trainer(config, layout, GRAPH, resources)
    hf_config = read_config(config.model.folder)
    actor, _ = load_actor(config, layout, hf_config)
    training = read_training_graph(actor.model)

    def compare() -> GraphComparison:
        folder = Path(resources.enter_context(TemporaryDirectory(prefix="megatron-rl-graph-")))
        engines = start_empty_engines(config, hf_config, folder, folder)
        resources.callback(engines.stop)
        return GraphComparison(training.value, tuple(engines.read_graph()))

    return Rank0(compare)


def _report(comparison: GraphComparison, svg: Path | None, json_file: Path | None) -> bool:
    differences = comparison.differences
    rollout_graphs = comparison.group_rollout_graphs()
    for graph, ranks in rollout_graphs.items():
        if len(rollout_graphs) > 1:
            print(f"engine rank {', '.join(map(str, ranks))}:")
        print_graphs(comparison.training, graph, Console())
    if svg is not None:
        svg.write_text(draw_svg(comparison.training, comparison.rollout[0]), encoding="utf-8")
        print(f"written: {svg}")
    if json_file is not None:
        json_file.write_text(json.dumps(comparison.to_json(), indent=1), encoding="utf-8")
        print(f"written: {json_file}")
    for line in comparison.other_kernels:
        print(f"kernels: {line}")
    if not differences:
        print("The rollout's graph is a subgraph of the training's forward pass.")
        return True
    print("The rollout's graph is NOT a subgraph of the training's forward pass:", *differences, sep="\n  ")
    return False
