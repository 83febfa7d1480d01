"""The command line: `megatron-rl train | eval | plan | rehearse | graph | locate | export | serve | report | doctor`.

Each command imports its implementation only when it runs, so that `--help` and invalid configurations do not import torch. Expected errors
print as one line to stderr. Exit codes: 2 for a user error, 3 for a failed run, 130 for Ctrl-C, 143 for SIGTERM and
SIGUSR1, 129 for SIGHUP.
"""

import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from megatron_rl import __version__
from megatron_rl.config import Config, load_config
from megatron_rl.config.base import MAX_RANKS
from megatron_rl.config.reading import parse_number, reading
from megatron_rl.errors import MegatronRLError, RunError, UserError, escape
from megatron_rl.observability.signals import install_signal_handlers
from megatron_rl.observability.streams import keep_streams
from megatron_rl.redaction import redact
from megatron_rl.versions import put_programs_on_path, require_packages
from megatron_rl.workers.temporary_folder import use_private_temporary_folder
from parallel.formats import FORMATS
from parallel.plug import SignalExit, find_plug_error
from parallel.shards import no_garbage_collection

Overrides = Annotated[list[str] | None, typer.Argument(metavar="--SECTION.KEY=VALUE", help="Values that override the file.")]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="TOML file of a run.", show_default=False)]
Checkpoint = Annotated[
    Path,
    typer.Option(help="Checkpoint folder of a run, Hugging Face folder, or hf:OWNER/NAME[@REVISION] from the hub.", show_default=False),
]
Nodes = Annotated[int | None, typer.Option(help="Number of nodes. Defaults to what the layouts need.", show_default=False)]
GpusPerNode = Annotated[int, typer.Option(help="GPUs per node.")]
Gpu = Annotated[str, typer.Option(help="GPU type: h100, h200, h800, h20, b200, gb200 or b300.")]

_TRAINING = ("torch", "megatron-core", "sglang")
_QUANTIZED = ", ".join(name for name, format in FORMATS.items() if format.quantized)
_ONE_ENGINE = "--rollout.engines=1"
_OTHER_RANKS_WAIT_S = 2.0
"""Delay before local ranks other than 0 print an error. If all ranks fail, torchrun ends them meanwhile, and only rank 0 prints."""


class _Program(TyperGroup):
    def invoke(self, ctx: Any) -> None:
        """Run a command. Its result False means exit code 1. Expected errors are one line."""
        with expected_errors(), no_other_exit():
            if super().invoke(ctx) is False:
                raise typer.Exit(1)


app = typer.Typer(
    cls=_Program,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Reinforcement learning in one FP8 precision flow with Megatron-Core for training and SGLang for inference.",
)


@app.callback(invoke_without_command=True)
def _program(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"megatron-rl {__version__}")
        raise typer.Exit


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="TOML file of a run, such as configs/quickstart.toml.", show_default=False)
    ],
    overrides: Overrides = None,
) -> None:
    """Train a policy, in this process or under torchrun."""
    if config.startswith("-"):
        raise UserError("CONFIG", config, "must be the config file", "write megatron-rl train CONFIG.toml --section.key=value")
    loaded_config: Config = load_config(Path(config), overrides or [])
    require_packages("train", *_TRAINING)
    from megatron_rl.preflight import check_run, pin_model

    loaded_config = pin_model(loaded_config)
    with reading("TMPDIR", os.environ.get("TMPDIR"), "name a folder that you can write to"):
        use_private_temporary_folder()
    layout = check_run(loaded_config)
    from megatron_rl.mcore import wandb_hidden

    with wandb_hidden(), no_garbage_collection():
        from megatron_rl.training.session import run_session  # takes seconds, so it follows the checks

    run_dir = run_session(loaded_config, layout)
    if _rank("RANK") == 0:
        from megatron_rl.reporting.closing import closing_lines

        print(*closing_lines(run_dir), sep="\n")


@app.command("eval", context_settings={"ignore_unknown_options": True})
def evaluate(
    config: ConfigFile,
    checkpoint: Checkpoint,
    overrides: Overrides = None,
    baseline: Annotated[Path | None, typer.Option(help="Checkpoint to compare with on the same problems.")] = None,
    samples: Annotated[int | None, typer.Option(help="Completions per problem, like --eval.samples.", show_default=False)] = None,
    at: Annotated[str | None, typer.Option(help="Values of k for pass@k and maj@k, such as 1,8,64. Defaults to powers of two.")] = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Same as --samples 1 --eval.temperature=0.")] = False,
    output: Annotated[Path | None, typer.Option(help="New folder for results. Defaults to RUN_DIR/eval/STEP or LOG.DIR/eval.")] = None,
) -> None:
    """Evaluate a checkpoint on held-out problems: mean@k, pass@k and maj@k with confidence intervals, by data set and level."""
    sampling = ["--eval.temperature=0", "--eval.samples=1"] * greedy + [f"--eval.samples={samples}"] * (samples is not None)
    loaded_config: Config = load_config(config, [*(overrides or []), *sampling])
    require_packages("eval", *_TRAINING)
    from megatron_rl.cli.evaluate import EvalRequest
    from megatron_rl.cli.evaluate import evaluate as run_evaluation

    with reading("TMPDIR", os.environ.get("TMPDIR"), "name a folder that you can write to"):
        use_private_temporary_folder()
    folder = run_evaluation(loaded_config, EvalRequest(checkpoint, baseline, at, output))
    print(f"results: {folder / 'eval.json'}")
    print(f"page:    {folder / 'eval.html'}")


@app.command(context_settings={"ignore_unknown_options": True})
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = 8,
    gpu: Gpu = "h100",
    top: Annotated[int, typer.Option(help="Number of layouts to rank.")] = 5,
    json: Annotated[Path | None, typer.Option(help="JSON file for the plan.")] = None,
    sbatch: Annotated[Path | None, typer.Option(help="SLURM batch file that starts the plan.")] = None,
) -> None:
    """Estimate memory, step time and weight sync of a run on a cluster, and rank layouts. Needs no GPU and only the model's config.json."""
    loaded_config: Config = load_config(config, overrides or [])
    from megatron_rl.cli.plan import PlanOptions, run_plan

    run_plan(loaded_config, PlanOptions(config, tuple(overrides or []), nodes, gpus_per_node, gpu, top, json, sbatch))


@app.command(context_settings={"ignore_unknown_options": True})
def rehearse(
    config: ConfigFile,
    overrides: Overrides = None,
    nodes: Nodes = None,
    gpus_per_node: GpusPerNode = 8,
    gpu: Gpu = "h100",
    ranks: Annotated[str | None, typer.Option(help="Ranks such as 0,7,last. Defaults to one per kind of pipeline stage.")] = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for the report.")] = None,
) -> bool:
    """Rehearse a GPU job without a GPU: run the trainer's code of some ranks on tensors without data. Shows failures, memory compared with
    `plan`, host synchronizations and collectives. Exit with 1 if a rank fails or its memory differs from the plan."""
    loaded_config: Config = load_config(config, overrides or [])
    require_packages("rehearse", *_TRAINING)
    from megatron_rl.cli.rehearse import RehearseOptions, run_rehearsal

    return run_rehearsal(loaded_config, RehearseOptions(nodes, gpus_per_node, gpu, ranks, json))


@app.command(context_settings={"ignore_unknown_options": True})
def graph(
    config: ConfigFile,
    overrides: Overrides = None,
    svg: Annotated[Path | None, typer.Option(help="SVG file for one layer of both graphs.")] = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for both graphs and their differences.")] = None,
) -> bool:
    """Start trainer and engine, and show the precision of every tensor in both. Exit with 1 if the engine's graph is not a subgraph of the
    training forward pass, which is expected for modes that quantize only the engine."""
    loaded_config: Config = load_config(config, [*(overrides or []), _ONE_ENGINE])
    require_packages("graph", *_TRAINING)
    from megatron_rl.cli.graph import show_graph

    return show_graph(loaded_config, svg, json)


@app.command(context_settings={"ignore_unknown_options": True})
def locate(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CONFIG", help="Run folder, or TOML file of a run.", show_default=False)],
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option(help="Text to walk instead of random tokens.", show_default=False)] = None,
    json: Annotated[Path | None, typer.Option(help="JSON file for the report.")] = None,
) -> bool:
    """Walk trainer and engine through one prompt, and name the first operator, layer, token and element that differ, with the likely cause.
    A run's newest checkpoint is loaded. Exit with 1 if anything differs."""
    from megatron_rl.cli.run_settings import read_settings

    loaded_config, run = read_settings(source, [*(overrides or []), _ONE_ENGINE])
    require_packages("locate", *_TRAINING)
    from megatron_rl.cli.locate import locate_difference

    return locate_difference(loaded_config, run, prompt, json)


@app.command()
def export(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Option(help="New folder for the Hugging Face checkpoint.", show_default=False)],
    precision: Annotated[str, typer.Option(help=f"bf16, or the bytes that the engine uses: {_QUANTIZED}.")] = "bf16",
    align: Annotated[int | None, typer.Option(min=1, help="Pad matrices with zeros to multiples of this, such as 128 for FP8.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="With --align, number of ranks whose shards must be aligned.")] = 1,
    expert_tensor_parallel: Annotated[int | None, typer.Option(min=1, help="The same for experts. Defaults to the same number.")] = None,
) -> None:
    """Convert a checkpoint of a run, or a Hugging Face checkpoint, to a Hugging Face checkpoint of some precision. Adapters are written in
    PEFT's format. With --align, the padded model computes the same function. Under torchrun, the ranks share the work."""
    if align is None and (tensor_parallel, expert_tensor_parallel) != (1, None):
        raise UserError("--tensor-parallel", tensor_parallel, "only applies with --align", "add --align 128")
    require_packages("export", *_TRAINING[:2])
    from megatron_rl.hf.align import Alignment
    from megatron_rl.mcore.checkpoint.export import export_checkpoint

    alignment = Alignment(align, tensor_parallel, expert_tensor_parallel or 0) if align else None
    export_checkpoint(checkpoint, output, precision, alignment)
    if _rank("RANK") == 0:
        print(f"checkpoint: {output}")


@app.command(context_settings={"ignore_unknown_options": True})
def serve(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Hugging Face checkpoint, or hf:OWNER/NAME.", show_default=False)],
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address of the network interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    tp: Annotated[int, typer.Option(min=1, help="Number of devices that share the model, its tensor-parallel size.")] = 1,
    config: Annotated[Path | None, typer.Option(help="TOML file of the run: its sampling and parsers.", show_default=False)] = None,
    tool_call_parser: Annotated[str, typer.Option(help="SGLang's name for the format of tool calls.")] = "",
    reasoning_parser: Annotated[str, typer.Option(help="SGLang's name for the format of thoughts.")] = "",
) -> None:
    """Serve a checkpoint, as of `export`, with OpenAI's interface until Ctrl-C, by the engine of a run. Clients need the API key: the value
    of the environment variable MEGATRON_RL_API_KEY, or a new one that is printed. Options such as --rollout.max_total_tokens apply to the
    engine."""
    from megatron_rl.cli.serve import serve as run_server

    parsers = {"tool_parser": tool_call_parser, "reasoning_parser": reasoning_parser}
    run_server(folder, port, {"hosts": (host,), "tp": tp}, overrides or [], config, parsers)


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Run folders of `train`.", show_default=False)],
    output: Annotated[Path | None, typer.Option(help="File for the comparison of several runs.", show_default=False)] = None,
) -> None:
    """Write report.html, a self-contained page about one run, or a page that compares several runs."""
    if len(run_dirs) > 1:
        from megatron_rl.reporting.comparison import write_comparison

        print(f"comparison: {write_comparison(run_dirs, output)}")
        return
    if output is not None:
        raise UserError("--output", str(output), "only applies to several runs", "remove it, or add more runs")
    from megatron_rl.reporting.report import read_facts, write_report

    print(f"report: {write_report(run_dirs[0])}")
    print(escape(redact(read_facts(run_dirs[0]).state["sentence"])))


@app.command()
def doctor() -> None:
    """Show installed versions, the code that a run uses on this machine, and what is missing."""
    from megatron_rl.cli.doctor import print_diagnosis

    print_diagnosis()


def _use_utf8() -> None:
    """Start again in Python's UTF-8 mode if the locale has another encoding, such as ASCII or GBK. Files of a run, names of files, and
    output are UTF-8, and so are those of the processes that a run starts. Arguments that are not UTF-8 keep the locale's encoding."""
    try:
        arguments = [os.fsencode(each).decode("utf-8") for each in sys.orig_argv[1:]]
    except UnicodeDecodeError:
        return
    if sys.getfilesystemencoding() != "utf-8":
        encoded = [each.encode("utf-8") for each in (sys.executable, "-X", "utf8", *arguments)]
        os.execve(sys.executable, encoded, os.environ | {"PYTHONUTF8": "1"})


def main() -> None:
    _use_utf8()
    keep_streams()
    install_signal_handlers()
    put_programs_on_path()
    app(prog_name="megatron-rl")


@contextmanager
def expected_errors() -> Iterator[None]:
    """Context manager that prints expected errors as one line, after the last log lines of a failed process, and exits with their code."""
    try:
        yield
    except MegatronRLError as error:
        _exit_with(error)
    except KeyboardInterrupt:
        print(f"{_prefix()}: interrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
    except Exception as error:
        if (failure := find_plug_error(error)) is None:
            raise
        _exit_with(RunError(str(failure)))


@contextmanager
def no_other_exit() -> Iterator[None]:
    """Context manager for a command that only the project's own code may end: any other SystemExit, such as `sys.exit(0)` in code of the
    user's own, would pass for success."""
    try:
        yield
    except SignalExit:
        raise
    except SystemExit as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(str(find_plug_error(error) or f"{place.filename} line {place.lineno} calls sys.exit({error})")) from None


def _exit_with(error: MegatronRLError) -> NoReturn:
    if _rank("LOCAL_RANK") > 0:
        time.sleep(_OTHER_RANKS_WAIT_S)
    tail = getattr(error, "log_tail", "").rstrip()
    lines = "\n".join(f"{_prefix()}: {line}" for line in str(error).splitlines())
    print(f"{tail}\n" * bool(tail) + lines, file=sys.stderr, flush=True)
    raise SystemExit(error.exit_code) from None


def run_script(*commands: Callable[..., None]) -> None:
    """Run a tool's function as a command, or several functions as subcommands, and print expected errors as one line. If a function has a
    parameter `context`, unknown options are passed in `context.args`; otherwise they are refused."""
    script = typer.Typer(add_completion=False)
    for command in commands:
        takes_more = "context" in inspect.signature(command).parameters
        script.command(context_settings={"allow_extra_args": takes_more, "ignore_unknown_options": takes_more})(command)
    keep_streams()
    install_signal_handlers()
    with expected_errors():
        script()


def _prefix() -> str:
    return f"megatron-rl [rank {rank}]" if (rank := _rank("RANK")) else "megatron-rl"


def _rank(variable: str) -> int:
    """Return a rank from an environment variable of torchrun, or 0 without torchrun."""
    return parse_number(os.environ.get(variable, ""), 0, MAX_RANKS) or 0
