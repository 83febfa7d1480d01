"""The command `serve`: an inference engine as in a run, alone, with OpenAI's interface, for a Hugging Face checkpoint."""

import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.config import Config
from megatron_rl.config.hosts import check_listening, join_port
from megatron_rl.config.hub import find_model_folder
from megatron_rl.config.loading import load_config, make_config
from megatron_rl.errors import RunError, UserError
from megatron_rl.evaluation.checkpoint import check_checkpoint
from megatron_rl.hf.checkpoint_format import find_checkpoint_format, find_high_format
from megatron_rl.hf.files import read_config
from megatron_rl.hf.hub import pin_hub_model
from megatron_rl.hf.tokenizer import load_tokenizer
from megatron_rl.rollout.engine import find_engine_launcher
from megatron_rl.workers.temporary_folder import use_private_temporary_folder
from parallel.formats import MODES

SAMPLING = ("temperature", "top_p", "top_k", "min_p")
KEY_VARIABLE = "MEGATRON_RL_API_KEY"


def serve(path: Path, port: int, fields: dict[str, Any], overrides: Sequence[str], run: Path | None, parsers: dict[str, str]) -> None:
    """Serve until a signal ends this process. `fields` of `[rollout]` precede `overrides`. `run`: the configuration that trained the
    checkpoint, which gives sampling and parsers; `parsers` of `[agent]` precede its own. Raise UserError before an engine starts, or
    RunError if it ends by itself."""
    path = pin_hub_model(path, "FOLDER")
    trained = load_config(run) if run else None
    if trained is not None:
        fields = {name: getattr(trained.rollout, name) for name in SAMPLING} | fields
    agent: dict[str, str] = {name: getattr(trained.agent, name) for name in parsers} if trained and trained.agent else {}
    agent = {**dict.fromkeys(parsers, ""), **agent, **{name: value for name, value in parsers.items() if value}}
    config = _make_config(path, fields, overrides, agent)
    options = {name: getattr(config.rollout, name) for name in SAMPLING}
    given = os.environ.pop(KEY_VARIABLE, "")
    if given and not re.fullmatch(r"\w[\w.~+/=-]*", given, re.ASCII):
        raise UserError(KEY_VARIABLE, None, "must consist of letters, digits, and . ~ + / = _ -", "write another key, or unset it")
    launcher = find_engine_launcher(config.rollout.engine)
    launcher.check(config)
    checkpoint = check_checkpoint(path, "FOLDER", config)
    load_tokenizer(checkpoint.tokenizer, "FOLDER")
    host, key = config.rollout.hosts[0], given or secrets.token_hex(24)
    try:
        check_listening(host, port)
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise UserError("--port", port, f"cannot be bound on {host} ({reason})", "choose another port, or another --host") from None
    use_private_temporary_folder()
    folder = Path(tempfile.mkdtemp())

    lines = (
        f"serving: {config.model.name} at http://{join_port(host, port)}/v1 until Ctrl-C",
        f"sampling: {', '.join(f'{name} {value:g}' for name, value in options.items())}, unless a request says otherwise",
        f"API key: {f'the value of {KEY_VARIABLE}' if given else key}",
        f"log:     {folder / 'engine.log'}",
    )
    try:
        model = checkpoint.prepare(config, folder / "model")
        options |= {"chat_template_kwargs": kwargs} if trained and (kwargs := dict(trained.data.chat_template_kwargs)) else {}
        launcher.serve(config, model, folder, port, key, "\n".join(lines), options)
    except RunError as error:
        raise RunError(str(error).partition("; log: ")[0], error.log_tail) from None  # the log is removed with its folder


def _make_config(path: Path, fields: dict[str, Any], overrides: Sequence[str], agent: dict[str, str]) -> Config:
    """Return the configuration of an engine that serves a checkpoint in its own precision."""
    hf_config = read_config(find_model_folder(path), "FOLDER")
    stored = find_checkpoint_format(hf_config)
    name = stored.name if stored else ""
    mode = next(mode for mode, formats in MODES.items() if (formats.engine.name if formats.engine else "") == name)
    precision = {"mode": mode, "high": find_high_format(hf_config)}
    if stored:
        precision["scale_format"] = stored.scale_format
    no_run = {"data": {"max_prompt_tokens": 1}, "rollout": {**fields, "max_new_tokens": 1}}  # requests have their own lengths
    no_run["agent"] = {"command": ["none"], "max_tokens": 2, **agent}
    return make_config({"model": {"path": str(path)}, "precision": precision, **no_run}, overrides)
