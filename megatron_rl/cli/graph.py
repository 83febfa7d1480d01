"""The command `graph`: starts trainer and engine as a run would, reads and shows both precision graphs, and stops everything."""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console

from megatron_rl.cli.run_settings import check_output_files
from megatron_rl.config import Config
from megatron_rl.distributed import Rank0, errors_on_all_ranks, run_on_rank0
from megatron_rl.hf.files import read_config
from megatron_rl.hf.hub import fetch_weights
from megatron_rl.hf.write import describe_weights, write_all_but_weights
from megatron_rl.mcore.actor import Actor
from megatron_rl.mcore.model import build_model, start_megatron, stop_megatron
from megatron_rl.mcore.weights.load_weights import build_rank_shards, load_checkpoint
from megatron_rl.observability.signals import install_signal_handlers
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.graph.render import draw_svg, print_graphs
from megatron_rl.preflight import GRAPH, check_on_rank_0, check_run, pin_model
from megatron_rl.rollout.engine import find_engine_launcher
from megatron_rl.training.graph_check import GraphComparison, read_training_graph
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
    install_signal_handlers(alone=True)  # SIGTERM unwinds the stack, which stops the engine
    start_megatron(layout, config.train.seed)
    resources.callback(stop_megatron)
    run_on_rank0(lambda: check_on_rank_0(config, GRAPH))
    with errors_on_all_ranks():
        fetch_weights(config.model.path)
    folder = run_on_rank0(lambda: Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="megatron-rl-graph-"))), Path)
    hf_config, contract = read_config(config.model.folder), PrecisionContract.from_config(config.precision)
    model = build_model(hf_config, layout, contract, config.train)
    load_checkpoint(model, config.model.folder, build_rank_shards(hf_config, layout))
    Actor(model, config.train, config.rollout.temperature)  # creates masters and gradient buffers, and quantizes the weights
    training = read_training_graph(model)

    def compare() -> GraphComparison:
        write_all_but_weights(folder, describe_weights(hf_config, contract), config.model.folder)
        engine = find_engine_launcher(config.rollout.engine)(config, folder, folder, empty=True)
        resources.callback(engine.stop)
        engine.wait_until_ready()
        return GraphComparison(training.value, tuple(engine.read_graph()))

    return Rank0(compare)


def _report(comparison: GraphComparison, svg: Path | None, json_file: Path | None) -> bool:
    differences = comparison.differences
    rollout_graphs = comparison.group_rollout_graphs()
    for graph, ranks in rollout_graphs.items():
        if len(rollout_graphs) > 1:
            print(f"engine rank {', '.join(map(str, ranks))}:")
        print_graphs(comparison.training, graph, Console())
    if svg is not None:
        svg.write_text(draw_svg(comparison.training, comparison.rollout[0]))
        print(f"written: {svg}")
    if json_file is not None:
        json_file.write_text(json.dumps(comparison.to_json(), indent=1))
        print(f"written: {json_file}")
    if not differences:
        print("The rollout's graph is a subgraph of the training's forward pass.")
        return True
    print("The rollout's graph is NOT a subgraph of the training's forward pass:", *differences, sep="\n  ")
    return False
