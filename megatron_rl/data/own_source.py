"""Problems from a source of the user's own, named in `data.train` or `data.eval` as `module:attribute`; one of two things.

a function    yields rows: mappings, which a format reads as it reads those of a file; called with the source's settings
a class       generates problems without end: `ProblemGenerator`; called with `data.seed` and the settings
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.plugs import DATA_SOURCES
from megatron_rl.types import Problem


class ProblemGenerator(Protocol):
    """Makes problems, the same ones in every process; `prompt` of each is the bare question."""

    fingerprint: tuple[object, ...]
    """Plain values that decide the problems and their order: a run is not resumed where they differ."""

    def train_problem(self, position: int, accept: Callable[[Problem], bool]) -> Problem:
        """Return problem `position`, from 0, of the endless train stream: the first of its candidates that `accept` accepts, which refuses
        what is held out or too long. Raise UserError where it refuses all."""

    def held_out(self, count: int) -> Sequence[Problem]:
        """Return `count` distinct held-out problems, none of which is in the train stream."""


def load_generator(source: DataSourceConfig, data: DataConfig, field: str) -> ProblemGenerator | None:
    """Return the generator that `source` names, None where it names rows. Raise UserError where it cannot be made.

    `field` is the configuration field that named the source, also below.
    """
    made = _load(source, field) if source.is_own else None
    return _call(made, source, data, field, data.seed) if made is not None and hasattr(made, "train_problem") else None


def check_generator(generator: ProblemGenerator, source: DataSourceConfig, data: DataConfig, field: str) -> None:
    """Raise UserError where the generator cannot make the problems that `field` asks for first."""
    try:
        problems = generator.held_out(data.eval_size) if field == "data.eval" else [generator.train_problem(0, lambda problem: True)]
        texts = [text for problem in problems for text in (problem.id, problem.prompt, problem.answer)]
        if not isinstance(generator.fingerprint, tuple) or not all(isinstance(text, str) for text in texts):
            raise TypeError("fingerprint must be a tuple; id, prompt and answer of a problem must be texts")
    except UserError:
        raise
    except Exception as error:  # whatever the user's class raises
        raise UserError(field, source.source, f"fails ({type(error).__name__}: {error})", "see docs/extending.md") from None


def read_own_rows(source: DataSourceConfig, data: DataConfig, field: str) -> Iterator[tuple[int, object]]:
    """Yield (number from 1, row) of every row that the function gives. Raise UserError where it fails."""
    rows, number = _call(_load(source, field), source, data, field), 0
    try:
        for number, row in enumerate(rows, start=1):
            yield number, row
    except Exception as error:  # whatever the user's function raises
        raise UserError(field, source.source, f"fails after {number} rows ({type(error).__name__}: {error})", "correct it") from None


def _load(source: DataSourceConfig, field: str) -> Any:
    with as_user_error():
        return replace(DATA_SOURCES, field=field).load(source.source)


def _call(made: Callable[..., Any], source: DataSourceConfig, data: DataConfig, field: str, *arguments: object) -> Any:
    settings = data.settings if source.settings is None else source.settings
    try:
        return made(*arguments, **settings)
    except UserError:
        raise
    except Exception as error:  # settings that it does not take, or whatever it raises
        rule = f"cannot be made with the settings {settings} ({type(error).__name__}: {error})"
        raise UserError(field, source.source, rule, "correct data.settings, or the settings beside the source") from None
