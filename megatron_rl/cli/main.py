"""The command line: `megatron-rl train | eval | plan | rehearse | graph | export | report | doctor`.

Each command imports what it runs only when it runs, so that `--help` and a mistyped config cost no torch. Expected errors print as one
line on stderr and end with their exit code: 2 for the user's mistakes, 3 for a broken run. Ctrl-C ends with 130.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megatron_rl import __version__
from megatron_rl.errors import MegatronRLError, UserError
from megatron_rl.versions import put_programs_on_path
from parallel.formats import FORMATS

if TYPE_CHECKING:
    from megatron_rl.config import Config

Overrides = Annotated[list[str] | None, typer.Argument(metavar="--SECTION.KEY=VALUE", help="Values over the file's.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A run's TOML file.", show_default=False)]

_QUANTIZED = ", ".join(name for name, format in FORMATS.items() if format.quantized)
_CHECKPOINT = "A checkpoint folder that a run wrote, a Hugging Face one, or hf:OWNER/NAME[@REVISION] from the hub."
_OTHER_RANKS_WAIT_S = 2.0
"""Wait of local ranks other than 0 before they print an error. Where all ranks fail alike, torchrun ends this process meanwhile and only
rank 0 prints; a rank that fails alone prints after the wait."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement learning in one FP8 precision flow: Megatron-Core trains, SGLang samples.",
)


@app.callback(invoke_without_command=True)
def _program(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"megatron-rl {__version__}")
        raise typer.Exit


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A TOML file such as configs/quickstart.toml.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Train the policy that CONFIG describes, in this process or under torchrun."""
    with expected_errors():
        if config.startswith("-"):
            raise UserError("CONFIG", config, "the config file comes first", "megatron-rl train CONFIG.toml --section.key=value")
        loaded_config = _load_config(Path(config), overrides)
        from megatron_rl.preflight import check_run, pin_model

        loaded_config = pin_model(loaded_config)
        layout = check_run(loaded_config)
        from megatron_rl.mcore import wandb_hidden

        with wandb_hidden():
            from megatron_rl.training.session import run_session  # seconds of imports, after the mistakes

        run_dir = run_session(loaded_config, layout)
        if _rank("RANK") == 0:
            print(f"run folder: {run_dir}")
            if (page := run_dir / "report.html").exists():
                print(f"report:     {page}")


@app.command("eval", context_settings={"ignore_unknown_options": True})
def evaluate(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="Names data.eval, reward, rollout and precision.", show_default=False)],
    checkpoint: Annotated[Path, typer.Option(help=_CHECKPOINT, show_default=False)],
    overrides: Overrides = None,
    baseline: Annotated[Path | None, typer.Option(help="Another checkpoint, asked the same problems, to compare with.")] = None,
    samples: Annotated[int | None, typer.Option(help="Completions per problem, as --eval.samples.", show_default=False)] = None,
    at: Annotated[str | None, typer.Option(help="The k of pass@k and maj@k, such as 1,8,64; default: powers of two.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="As --samples 1 --eval.temperature=0.")] = False,
    output: Annotated[Path | None, typer.Option(help="New folder for the results; default: RUN_DIR/eval/STEP, or in log.dir.")] = None,
) -> None:
    """Measure a checkpoint on the held-out problems: mean@k, pass@k and maj@k with confidence intervals, by data set and level."""
    with expected_errors():
        sampling = ["--eval.temperature=0", "--eval.samples=1"] * greedy + [f"--eval.samples={samples}"] * (samples is not None)
        loaded_config = _load_config(config, [*(overrides or []), *sampling])
        from megatron_rl.cli.evaluate import EvalRequest
        from megatron_rl.cli.evaluate import evaluate as run_evaluation

        folder = run_evaluation(loaded_config, EvalRequest(checkpoint, baseline, at, output))
        print(f"results: {folder / 'eval.json'}")
        print(f"page:    {folder / 'eval.html'}")


@app.command(context_settings={"ignore_unknown_options": True})
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of the cluster; default: what train.layout fills.", show_default=False)] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    gpu: Annotated[str, typer.Option(help="h100, h200, h800 or h20.")] = "h100",
    top: Annotated[int, typer.Option(help="Layouts to rank.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Also write the plan into this file.")] = None,
    sbatch: Annotated[Path | None, typer.Option(help="Also write a batch file for SLURM that starts the plan.")] = None,
) -> None:
    """Tell what a run would hold, move and wait for on a cluster, without a GPU: memory by phase, block alignment, the sync, and the best
    layouts. Of the model, config.json alone is read."""
    with expected_errors():
        loaded_config = _load_config(config, overrides)
        from megatron_rl.cli.plan import PlanOptions, run_plan

        run_plan(loaded_config, PlanOptions(config, tuple(overrides or []), nodes, gpus_per_node, gpu, top, json, sbatch))


@app.command(context_settings={"ignore_unknown_options": True})
def rehearse(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Annotated[int | None, typer.Option(help="Nodes of the cluster; default: what the layouts fill.", show_default=False)] = None,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    gpu: Annotated[str, typer.Option(help="h100, h200, h800 or h20.")] = "h100",
    ranks: Annotated[
        str | None, typer.Option(help="Such as 0,7,last; default: one of each kind of pipeline stage.", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the report into this file.")] = None,
) -> None:
    """Run the trainer's GPU program of some ranks on tensors without data, without a GPU: what would fail, memory against `plan`, waits of
    the host, collectives. Exit with 1 where a rank fails or takes other memory than planned."""
    with expected_errors():
        loaded_config = _load_config(config, overrides)
        from megatron_rl.cli.rehearse import RehearseOptions, run_rehearsal

        passes = run_rehearsal(loaded_config, RehearseOptions(nodes, gpus_per_node, gpu, ranks, json))
    if not passes:
        raise typer.Exit(1)


@app.command(context_settings={"ignore_unknown_options": True})
def graph(
    config: ConfigFile,
    overrides: Overrides = None,
    svg: Annotated[Path | None, typer.Option(help="Also draw one layer of both graphs into this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Also write both graphs and their differences into this file.")] = None,
) -> None:
    """Show the precision of every tensor in trainer and engine, read from both live, and exit with 1 where the rollout's graph is no
    subgraph of the training's forward pass. Modes that quantize the engine alone do not promise that: their differences are the
    mode itself."""
    with expected_errors():
        loaded_config = _load_config(config, overrides)
        from megatron_rl.cli.graph import show_graph

        matches = show_graph(loaded_config, svg, json)
    if not matches:
        raise typer.Exit(1)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Option(help=_CHECKPOINT, show_default=False)],
    output: Annotated[Path, typer.Option(help="The new folder for the Hugging Face checkpoint.", show_default=False)],
    precision: Annotated[str, typer.Option(help=f"bf16, or {_QUANTIZED}: the very bytes that the engine served.")] = "bf16",
    align: Annotated[int | None, typer.Option(min=1, help="Widen matrices with zeros to multiples of this: 128 for FP8.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="With --align: ranks that shall cut them at such multiples.")] = 1,
    expert_tensor_parallel: Annotated[int | None, typer.Option(min=1, help="Also of each expert; default: the same.")] = None,
) -> None:
    """Write a run's checkpoint, or a Hugging Face one in the other precision, as a Hugging Face checkpoint; a run's adapters in PEFT's
    format. With --align its matrices are wider, and compute the same. Ranks under torchrun share the work."""
    with expected_errors():
        if align is None and (tensor_parallel, expert_tensor_parallel) != (1, None):
            raise UserError("--tensor-parallel", tensor_parallel, "says for how many ranks --align widens", "add --align 128")
        from megatron_rl.hf.align import Alignment
        from megatron_rl.mcore.weights.export import export_checkpoint

        alignment = Alignment(align, tensor_parallel, expert_tensor_parallel or 0) if align else None
        export_checkpoint(checkpoint, output, precision, alignment)
        if _rank("RANK") == 0:
            print(f"checkpoint: {output}")


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Folders that `train` wrote.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="File for the comparison of several runs.", show_default=False)] = None,
) -> None:
    """Write report.html, one self-contained page, from what a run logged so far; of several runs a page that compares them."""
    with expected_errors():
        if len(run_dirs) > 1:
            from megatron_rl.reporting.comparison import write_comparison

            print(f"comparison: {write_comparison(run_dirs, output)}")
            return
        if output is not None:
            raise UserError("--output", str(output), "is for the comparison of several runs", "leave it out, or name more runs")
        from megatron_rl.reporting.report import write_report

        print(f"report: {write_report(run_dirs[0])}")


@app.command()
def doctor() -> None:
    """Show what is installed, what each job of a run will use here, and what is missing."""
    with expected_errors():
        from megatron_rl.cli.doctor import print_diagnosis

        print_diagnosis()


def main() -> None:
    """Entry point of the `megatron-rl` script and of `python -m megatron_rl`."""
    put_programs_on_path()
    app(prog_name="megatron-rl")


def _load_config(path: Path, overrides: list[str] | None) -> Config:
    from megatron_rl.config import load_config

    return load_config(path, overrides or [])


@contextmanager
def expected_errors() -> Iterator[None]:
    """Turn expected errors into their line and exit code; every other exception is a bug and keeps its traceback."""
    try:
        yield
    except MegatronRLError as error:
        if _rank("LOCAL_RANK") > 0:
            time.sleep(_OTHER_RANKS_WAIT_S)
        print(format_error(error), file=sys.stderr, flush=True)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        print(f"{_prefix()}: interrupted", file=sys.stderr, flush=True)
        raise typer.Exit(130) from None


def run_script(*commands: Callable[..., None]) -> None:
    """Run a tool's function as a command, or several by their names. Options that it does not know are left in `context.args` where it has
    a `context`, else refused; an expected error is one line."""
    script = typer.Typer(add_completion=False)
    for command in commands:
        takes_more = "context" in inspect.signature(command).parameters
        script.command(context_settings={"allow_extra_args": takes_more, "ignore_unknown_options": takes_more})(command)
    try:
        script()
    except MegatronRLError as error:
        print(format_error(error), file=sys.stderr)
        sys.exit(error.exit_code)


def format_error(error: MegatronRLError) -> str:
    """Return what the user reads: the failed part's last log lines, where there are any, then one line."""
    tail = getattr(error, "log_tail", "").rstrip()
    return (f"{tail}\n" if tail else "") + f"{_prefix()}: {error}"


def _prefix() -> str:
    return f"megatron-rl [rank {rank}]" if (rank := _rank("RANK")) else "megatron-rl"


def _rank(variable: str) -> int:
    """Return a rank from torchrun's environment variable; 0 outside of torchrun."""
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() else 0
