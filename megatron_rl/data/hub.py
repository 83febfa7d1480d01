"""Rows of a data set on the Hugging Face hub, through `datasets`: `hf:OWNER/NAME[@REVISION]:SPLIT`, or with :CONFIG before it.

Downloads are cached (HF_HOME, HF_DATASETS_CACHE) and then need no network (HF_HUB_OFFLINE=1). The folder of a local clone can replace
OWNER/NAME. Data sets that are programs are not run.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from megatron_rl.config.hub import HUB_PREFIX
from megatron_rl.errors import UserError


def read_hub_rows(source: str, field: str, columns: Container[str] | None) -> Iterator[tuple[int, object]]:
    """Yield (number from 1, row) of every row of the split. The first row is whole, the others hold `columns`; None for all.

    Raise UserError for a name of another shape, and for a data set, configuration or split that cannot be had.
    """
    name, *rest = source.removeprefix(HUB_PREFIX).split(":")
    if not name or len(rest) not in (1, 2) or not all(rest):
        rule = "is not of the form hf:OWNER/NAME:SPLIT or hf:OWNER/NAME:CONFIG:SPLIT"
        raise UserError(field, source, rule, "write it so, e.g. hf:openai/gsm8k:main:train")
    data_set = _load(source, name, rest[0] if len(rest) == 2 else None, rest[-1], field)
    narrow = data_set.select_columns([name for name in data_set.column_names if columns is None or name in columns])
    for number, row in enumerate(narrow, start=1):
        yield number, data_set[0] if number == 1 else row


def _load(source: str, name: str, config: str | None, split: str, field: str) -> Any:
    import datasets  # seconds to import, and most runs need none of it
    from huggingface_hub.utils import logging

    datasets.disable_progress_bars()
    logging.set_verbosity_error()  # a line of each retry
    try:
        repository, _, revision = (name, "", "") if Path(name).is_dir() else name.partition("@")
        return datasets.load_dataset(repository, config, split=split, revision=revision or None)
    except Exception as error:  # it raises OSErrors, ValueErrors and errors of its own and of the hub's client, by what is wrong
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        fix = "check the name and the network, or give the path of a downloaded Parquet file"
        raise UserError(field, source, f"cannot be loaded ({reason})", fix) from error
