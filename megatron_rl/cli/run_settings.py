"""Arguments that several commands have: a run's folder or a TOML file, and files to write. Does not import torch."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_rl.config import Config, load_config
from megatron_rl.config.loading import make_config
from megatron_rl.errors import UserError
from megatron_rl.observability.run_folder import read_run


def check_output_files(files: Mapping[str, Path | None]) -> None:
    """Raise UserError for an option whose file, if any, is in a folder that does not exist."""
    for option, file in files.items():
        if file is not None and not os.path.isdir(file.absolute().parent):
            raise UserError(option, str(file), "is in a folder that does not exist", "create the folder or name another file")


def read_settings(source: Path, overrides: Sequence[str]) -> tuple[Config, Path | None]:
    """Return the configuration to locate with, and the run whose newest checkpoint is loaded. `source` is a TOML file or a run's folder.
    Raise UserError if it cannot be read."""
    if not os.path.isdir(source):
        return load_config(source, overrides), None
    return make_config(read_run(source, field="RUN_OR_CONFIG").get("config") or {}, overrides), source
