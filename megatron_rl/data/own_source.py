"""Custom sources of problems, named in `data.train` or `data.eval` as `module:attribute`.

A source is either a function that yields rows, which are read like those of a file, or a `ProblemGenerator` class.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.plugs import DATA_SOURCES
from megatron_rl.types import Problem


class ProblemGenerator(Protocol):
    """A class that generates problems without end, constructed with `data.seed` and the source's settings as keyword arguments.

    It must generate the same problems in every process. `prompt` of each problem is the bare question.
    """

    fingerprint: tuple[object, ...]
    """Plain values that determine the problems and their order. A run cannot be resumed if they differ."""

    def train_problem(self, position: int, accept: Callable[[Problem], bool]) -> Problem:
        """Return the problem at a position of the endless training stream, from 0: the first candidate for which `accept` returns True.
        `accept` rejects held-out problems and long prompts. Raise UserError if it rejects all candidates."""

    def held_out(self, count: int) -> Sequence[Problem]:
        """Return `count` distinct held-out problems that are not in the training stream."""


def load_generator(source: DataSourceConfig, data: DataConfig, field: str) -> ProblemGenerator | None:
    """Construct the generator of a source, or return None if the source provides rows. Raise UserError if the construction fails.

    `field`: configuration field that named the source.
    """
    plug = _load(source, field) if source.is_own else None
    return _call(plug, source, data, field, data.seed) if plug is not None and hasattr(plug, "train_problem") else None


def check_generator(generator: ProblemGenerator, source: DataSourceConfig, data: DataConfig, field: str) -> None:
    """Raise UserError if the generator cannot make the first problems that `field` needs."""
    try:
        problems = generator.held_out(data.eval_size) if field == "data.eval" else [generator.train_problem(0, lambda problem: True)]
        texts = [text for problem in problems for text in (problem.id, problem.prompt, problem.answer)]
        if not isinstance(generator.fingerprint, tuple) or not all(isinstance(text, str) for text in texts):
            raise TypeError("fingerprint must be a tuple; id, prompt and answer of a problem must be strings")
    except UserError:
        raise
    except Exception as error:  # the custom class may raise anything
        raise UserError(field, source.source, f"fails ({type(error).__name__}: {error})", "see docs/extending.md") from None


def read_own_rows(source: DataSourceConfig, data: DataConfig, field: str) -> Iterator[tuple[int, object]]:
    """Yield (number from 1, row) for each row of the function. Raise UserError if the function fails."""
    rows, number = _call(_load(source, field), source, data, field), 0
    try:
        for number, row in enumerate(rows, start=1):
            yield number, row
    except Exception as error:  # the custom function may raise anything
        raise UserError(field, source.source, f"fails after {number} rows ({type(error).__name__}: {error})", "correct it") from None


def _load(source: DataSourceConfig, field: str) -> Any:
    with as_user_error():
        return replace(DATA_SOURCES, field=field).load(source.source)


def _call(plug: Callable[..., Any], source: DataSourceConfig, data: DataConfig, field: str, *arguments: object) -> Any:
    settings = data.settings if source.settings is None else source.settings
    try:
        return plug(*arguments, **settings)
    except UserError:
        raise
    except Exception as error:  # unknown settings, or any error of the custom code
        rule = f"cannot be called with the settings {settings} ({type(error).__name__}: {error})"
        raise UserError(field, source.source, rule, "correct data.settings or the settings of the source") from None
