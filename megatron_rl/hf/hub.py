"""Models on the Hugging Face hub, `hf:OWNER/NAME[@REVISION]`, downloaded with huggingface_hub into its cache. No torch.

`pin_hub_model` resolves the revision to a commit and downloads the small files, which are all that `plan` and most checks need;
`fetch_weights` downloads the weights after these checks. Ranks and run.json use the pinned name `hf:OWNER/NAME@COMMIT`, so a branch that
moves affects neither a run nor its resumption.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.config.hub import HUB_PREFIX, HubModel, find_model_folder
from megatron_rl.errors import UserError
from megatron_rl.hf.files import DOCUMENTS, SINGLE, WEIGHTS, read_index
from megatron_rl.hf.node_lock import node_lock

_LARGE = [".*", *(f"*{suffix}" for suffix in (*WEIGHTS, *DOCUMENTS))]
"""Patterns of files that are downloaded late or never."""
LOCK_SECONDS = 3600.0
"""Longest wait of a process for another one that downloads the same model."""


def pin_hub_model(path: Path, field: str = "model.path") -> Path:
    """Return `hf:OWNER/NAME@COMMIT`, with all files but weights and documents in the cache. A local folder is returned unchanged. Raises
    UserError, naming `field`, for a malformed name or a model that cannot be downloaded."""
    if (model := _parse(path, field)) is None:
        return path
    with _lock(model, path, field):
        folder = _download(model, None, path, field)
    if not os.path.isfile(folder / "config.json"):
        raise UserError(field, str(path), "holds no config.json", "name a model with config.json, tokenizer and safetensors weights")
    return Path(f"{HUB_PREFIX}{model.repository}@{folder.name}")


def fetch_weights(path: Path, field: str = "model.path") -> None:
    """Download the weights of a pinned model into the cache, unless the model is a local folder or cached already. Raises UserError, naming
    `field`, if the weights cannot be downloaded or are not safetensors files."""
    if (model := _parse(path, field)) is None:
        return
    folder = find_model_folder(path)
    files = sorted(set(read_index(folder, field).values())) or [SINGLE]
    with _lock(model, path, field):
        if not _find_missing(folder, files):
            return
        print(f"fetching the weights of {path} into {folder}", flush=True)
        _download(model, files, path, field)
    if missing := _find_missing(folder, files):
        not_cached = _refuse_offline(model, missing[0], path, field)
        raise not_cached or UserError(field, str(path), f"holds no {missing[0]}", "name a model with safetensors weights")


def fetch_model(path: Path, field: str) -> Path:
    """Return the local folder of a model, after downloading it if it is on the hub. Raise UserError, naming `field`."""
    pinned = pin_hub_model(path, field)
    fetch_weights(pinned, field)
    return find_model_folder(pinned)


def _parse(path: Path, field: str) -> HubModel | None:
    try:
        return HubModel.parse(path)
    except ValueError as error:
        raise UserError(field, str(path), str(error)) from None


def _find_missing(folder: Path, files: Sequence[str]) -> list[str]:
    return [file for file in files if not os.path.isfile(folder / file)]


def _download(model: HubModel, files: list[str] | None, path: Path, field: str) -> Path:
    """Download those of `files` that the model has, or all but weights and documents. Return the commit's folder in the cache."""
    from huggingface_hub import snapshot_download  # imported here, because most runs do not need it
    from huggingface_hub.utils import logging, tqdm

    logging.set_verbosity_error()  # otherwise every retry prints a line

    patterns: dict[str, Any] = {"allow_patterns": files} if files else {"ignore_patterns": _LARGE}

    class Bar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": not sys.stderr.isatty()})

    try:
        return Path(snapshot_download(model.repository, revision=model.revision, tqdm_class=Bar, **patterns))
    except Exception as error:  # huggingface_hub's and httpx's own errors, OSErrors and ValueErrors
        raise _to_user_error(error, model, files[0] if files else "config.json", path, field) from error


def _lock(model: HubModel, path: Path, field: str) -> AbstractContextManager[None]:
    """Let only one process of a node download a model. Processes that waited find all files in the cache."""

    def say(file: Path) -> None:
        print(f"waiting until another process has fetched {path} ({file})", flush=True)

    def refuse(file: Path) -> UserError:
        rule = f"is being fetched by another process, which has held {file} for {LOCK_SECONDS:g} s"
        return UserError(field, str(path), rule, "end that process, or wait for it and start again")

    return node_lock(model.repository, LOCK_SECONDS, say, refuse)


def _to_user_error(error: Exception, model: HubModel, file: str, path: Path, field: str) -> UserError:
    from huggingface_hub import constants, errors

    refuse = partial(UserError, field, str(path))
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)[:200]
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{model.repository}"
        return refuse("is gated: its owner grants access to accounts", f"request it at {page}, then run `hf auth login` or set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return refuse(f"is not a model that you can see on {constants.ENDPOINT}", "correct the name; set HF_TOKEN for a private model")
    if isinstance(error, errors.RevisionNotFoundError):
        return refuse(f"has no revision {model.revision or 'main'}", "name a branch, a tag or a full commit, or omit @REVISION")
    if isinstance(error, errors.HFValidationError):
        return refuse(f"is not a valid name on the hub ({reason})", "write hf:OWNER/NAME, for example hf:Qwen/Qwen3-8B")
    if not_cached := _refuse_offline(model, file, path, field):
        return not_cached
    if isinstance(error, errors.HfHubHTTPError):
        return refuse(f"cannot be downloaded: {constants.ENDPOINT} answers {reason}", "check HF_TOKEN, or try again later")
    rule = f"cannot be downloaded from {constants.ENDPOINT} ({reason}), and is not in the cache"
    return refuse(rule, f"check the network, its proxy, HF_ENDPOINT and free space in {constants.HF_HUB_CACHE}")


def _refuse_offline(model: HubModel, file: str, path: Path, field: str) -> UserError | None:
    """Return the error for a file that is not in the cache if downloads are disabled, else None."""
    from huggingface_hub import constants, is_offline_mode

    if not is_offline_mode():
        return None
    rule = f"HF_HUB_OFFLINE is set, and {file} is not in {constants.HF_HUB_CACHE}"
    return UserError(field, str(path), rule, f"unset it, or run `hf download {model.repository}` on a machine with network access")
