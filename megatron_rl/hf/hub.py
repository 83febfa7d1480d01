"""Models of the Hugging Face hub, `hf:OWNER/NAME[@REVISION]`, through huggingface_hub and its cache (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE).

A model comes in two parts. `pin_hub_model` finds the commit that the revision stands for and fetches the small files: all that `plan` and
most rules look at. `fetch_weights` adds the weights, after those rules. The pinned name `hf:OWNER/NAME@COMMIT` is what ranks tell each
other and what run.json records: a branch that moves changes neither a run nor its resumption. No torch.
"""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_rl.config.hub import HUB_PREFIX, HubModel, find_model_folder
from megatron_rl.errors import UserError
from megatron_rl.hf.files import INDEX, SINGLE, TOKENIZER_FILES, read_index


def pin_hub_model(path: Path, field: str = "model.path") -> Path:
    """Return `hf:OWNER/NAME@COMMIT` with config.json, index and tokenizer in the cache; a local folder is returned as it is.

    Raise UserError, naming `field`, for a name of another shape and for what cannot be had.
    """
    if (model := _parse(path, field)) is None:
        return path
    with _alone_on_this_node(model):
        folder = _download(model, ["config.json", INDEX, *TOKENIZER_FILES], path, field)
    if not (folder / "config.json").is_file():
        raise UserError(field, str(path), "holds no config.json", "name a model with config.json, tokenizer and safetensors weights")
    return Path(f"{HUB_PREFIX}{model.repository}@{folder.name}")


def fetch_weights(path: Path, field: str = "model.path") -> None:
    """Put the weights of a pinned model into the cache; nothing is done for a local folder, or where they are there.

    Raise UserError, naming `field`, for what cannot be had, and for a model without safetensors weights.
    """
    if (model := _parse(path, field)) is None:
        return
    folder = find_model_folder(path)
    files = sorted(set(read_index(folder, field).values())) or [SINGLE]
    with _alone_on_this_node(model):
        if not _find_missing(folder, files):
            return
        print(f"fetching the weights of {path} into {folder}", flush=True)
        _download(model, files, path, field)
    if missing := _find_missing(folder, files):
        if _is_offline():
            raise _not_in_cache(model, missing[0], path, field)
        raise UserError(field, str(path), f"holds no {missing[0]}", "name a model with safetensors weights")


def fetch_model(path: Path, field: str) -> Path:
    """Return the folder of a model, a local one or one of the hub, which is then whole in the cache. Raise UserError, naming `field`."""
    pinned = pin_hub_model(path, field)
    fetch_weights(pinned, field)
    return find_model_folder(pinned)


def _parse(path: Path, field: str) -> HubModel | None:
    try:
        return HubModel.parse(path)
    except ValueError as error:
        raise UserError(field, str(path), str(error)) from None


def _find_missing(folder: Path, files: Sequence[str]) -> list[str]:
    return [file for file in files if not (folder / file).is_file()]


def _download(model: HubModel, files: list[str], path: Path, field: str) -> Path:
    """Return the cache's folder of the commit, with those of `files` that the model has."""
    from huggingface_hub import snapshot_download  # most runs need none of it
    from huggingface_hub.utils import logging, tqdm

    logging.set_verbosity_error()  # a line of each retry

    class Bar(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": not sys.stderr.isatty()})

    try:
        return Path(snapshot_download(model.repository, revision=model.revision, allow_patterns=files, tqdm_class=Bar))
    except Exception as error:  # its own errors, httpx's, OSErrors and ValueErrors, by what is wrong
        raise _to_user_error(error, model, files[0], path, field) from error


@contextmanager
def _alone_on_this_node(model: HubModel) -> Iterator[None]:
    """Of a node's processes, one downloads; those that waited find everything in the cache."""
    name = f"megatron-rl-{os.getuid()}-{model.repository.replace('/', '--')}.lock"
    with (Path(tempfile.gettempdir()) / name).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _to_user_error(error: Exception, model: HubModel, file: str, path: Path, field: str) -> UserError:
    from huggingface_hub import constants, errors

    def refuse(rule: str, fix: str) -> UserError:
        return UserError(field, str(path), rule, fix)

    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    reason = next((line.strip() for line in str(cause).splitlines() if line.strip()), type(cause).__name__)[:200]
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{model.repository}"
        return refuse("is gated: its owner gives access to accounts", f"ask for it at {page}, then run `hf auth login` or set HF_TOKEN")
    if isinstance(error, errors.RepositoryNotFoundError):
        return refuse(f"is no model that {constants.ENDPOINT} shows you", "correct the name; for a private one set HF_TOKEN")
    if isinstance(error, errors.RevisionNotFoundError):
        return refuse(f"has no revision {model.revision or 'main'}", "name a branch, a tag or a whole commit, or leave @REVISION out")
    if isinstance(error, errors.HFValidationError):
        return refuse(f"is no name on the hub ({reason})", "write hf:OWNER/NAME, e.g. hf:Qwen/Qwen3-8B")
    if _is_offline():
        return _not_in_cache(model, file, path, field)
    if isinstance(error, errors.HfHubHTTPError):
        return refuse(f"cannot be had: {constants.ENDPOINT} answers {reason}", "check HF_TOKEN, or try again later")
    rule = f"cannot be had from {constants.ENDPOINT} ({reason}), and the cache has no copy"
    return refuse(rule, f"check the network, HF_ENDPOINT and the disk of {constants.HF_HUB_CACHE}")


def _is_offline() -> bool:
    from huggingface_hub import is_offline_mode

    return is_offline_mode()


def _not_in_cache(model: HubModel, file: str, path: Path, field: str) -> UserError:
    from huggingface_hub import constants

    rule = f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} has no {file} of it"
    return UserError(field, str(path), rule, f"unset it, or run `hf download {model.repository}` where there is a network")
