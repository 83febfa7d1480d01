"""Warm start: make the model that a run trains, by supervised training of random weights on worked examples.

    python -m examples.arithmetic.warm_start configs/quickstart.toml [--model FILE] [--section.key=value ...]

Trainer, layout, and precision are those of the run. A second file, by default examples/arithmetic/quickstart.toml, has the sections
`[architecture]` and `[warm_start]`. The result is a Hugging Face checkpoint at `model.path`. The folder appears when it
is complete, and an existing model is kept.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from examples.arithmetic.calculator import ENVIRONMENT
from examples.arithmetic.config import DemoConfig
from examples.arithmetic.task import SOURCE, Arithmetic
from examples.arithmetic.tool_agent import AGENT, CHAT_TEMPLATE
from megatron_rl.cli.main import ConfigFile, Overrides, expected_errors
from megatron_rl.config import load_config
from megatron_rl.config.hub import HubModel
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.hf.files import read_config
from parallel.model_geometry import ModelGeometry

_ABSENT = ("num_experts", "num_nextn_predict_layers")
"""Fields that the config.json of a model without them does not have."""


def main(
    config: ConfigFile,
    overrides: Overrides = None,
    model: Annotated[
        Path | None, typer.Option(help="File with [architecture] and [warm_start]; default: the one named like CONFIG.")
    ] = None,
) -> None:
    """Make the model that the run of CONFIG trains, in this process or under torchrun. An existing model is kept."""
    with expected_errors():
        file = model or Path(__file__).with_name(config.name)
        given = model is not None or file.is_file()
        demo = load_config(config, overrides or [], root=DemoConfig, more=file if given else None)
        if not (demo.model.path / "config.json").is_file():
            if not given:
                raise UserError(
                    "--model", None, f"is required, because {file} does not exist", "name a file with [architecture] and [warm_start]"
                )
            make_model(demo)
            return
        if given:
            _check_same_model(demo)
        _notify(f"warm start: {demo.model.path} exists already")


def make_model(config: DemoConfig) -> None:
    """Write the checkpoint at `model.path`. Collective. Raise UserError for a bad configuration before anything heavy starts.

    Each rank makes the same random weights, since ranks may be on several machines.
    """
    if HubModel.parse(config.model.path):
        raise UserError("model.path", str(config.model.path), "is on the hub, but the warm start makes a new model", "name a new folder")
    if config.model.path.exists():
        raise UserError("model.path", str(config.model.path), "exists but contains no config.json", "remove it, or name another folder")
    from examples.arithmetic.new_model import (
        make_random_checkpoint,
    )  # heavy imports come after the cheap checks
    from examples.arithmetic.supervised import train_and_save
    from megatron_rl.preflight import check_run

    with tempfile.TemporaryDirectory(prefix="megatron-rl-random-") as folder:
        make_random_checkpoint(Path(folder), config.architecture, config.warm_start.seed)
        if config.agent is not None:
            shutil.copy(CHAT_TEMPLATE, folder)
        untrained = config.model_copy(update={"model": config.model.model_copy(update={"path": Path(folder)})})
        layout = check_run(untrained)
        train_and_save(untrained, layout, find_levels(config), config.model.path, _notify)
    _notify(f"warm start saved to {config.model.path}")


def find_levels(config: DemoConfig) -> tuple[int, ...]:
    """Return the levels of the worked examples: those of the first generated set in `data.train`. Empty if `warm_start.steps` is 0.

    Raise UserError if there is no such set, or if examples call a tool that the run does not have.
    """
    warm, tools = config.warm_start, {section.name for section in (config.environment, config.agent) if section is not None}
    if warm.tool_share and not tools & {ENVIRONMENT, AGENT}:
        rule = "needs a tool, but the run has none"
        raise UserError("warm_start.tool_share", warm.tool_share, rule, f'add [environment] with name = "{ENVIRONMENT}", or an agent')
    if not warm.steps:
        return ()
    for source in config.data.train:
        if source.source == SOURCE:
            return Arithmetic(warm.seed, **(config.data.settings if source.settings is None else source.settings)).levels
    raise UserError("warm_start.steps", warm.steps, f"needs worked examples, which only {SOURCE} in data.train has", "set it to 0")


def _check_same_model(config: DemoConfig) -> None:
    """Raise UserError if the settings differ from the existing checkpoint, which is kept."""
    hf_config = read_config(config.model.path)
    with as_user_error():
        geometry = ModelGeometry.from_hf_config(hf_config)
    for name, value in config.architecture.model_dump().items():
        key = "n_routed_experts" if name == "num_experts" and "n_routed_experts" in hf_config else name
        existing = geometry.rope.theta if name == "rope_theta" else hf_config.get(key, 0 if name in _ABSENT else value)
        if existing != value:
            fix = "remove that folder, name another model.path, or set it back"
            raise UserError(f"architecture.{name}", value, f"the checkpoint already at {config.model.path} has {existing}", fix)


def _notify(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"ignore_unknown_options": True})(main)
    app()
