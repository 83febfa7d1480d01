"""Custom sources of problems, named in `data.train` or `data.eval` as `module:attribute`.

A source is either a function that yields rows, which are read like those of a file, or a `ProblemGenerator` class.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.data.chat import check_own_chat
from megatron_rl.data.formats import check_columns
from megatron_rl.errors import UserError, as_user_error
from megatron_rl.plugs import DATA_SOURCES
from megatron_rl.types import Problem
from parallel.plug import Plug, describe_error


class ProblemGenerator(Protocol):
    """A class that generates problems without end, constructed with `data.seed` and the source's settings as keyword arguments.

    It must generate the same problems in every process. `prompt` of each problem is the bare question.
    """

    @property
    def fingerprint(self) -> tuple[object, ...]:
        """Plain values that determine the problems and their order. A run cannot be resumed if they differ. An attribute will do."""

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
    if plug is None or not hasattr(plug, "train_problem"):
        return None
    return _GuardedGenerator(_call(plug, source, data, field, data.seed), replace(DATA_SOURCES, field=field), source.source)


class _GuardedGenerator:
    """A generator of the user's own. Raises PlugError for whatever it does, except for its UserErrors."""

    def __init__(self, generator: ProblemGenerator, plug: Plug, name: str) -> None:
        self._generator, self._plug, self._name = generator, plug, name

    @property
    def fingerprint(self) -> tuple[object, ...]:
        with self._plug.call(self._name):
            fingerprint = self._generator.fingerprint
            if not isinstance(fingerprint, tuple):
                raise TypeError("fingerprint must be a tuple")
            return fingerprint

    def train_problem(self, position: int, accept: Callable[[Problem], bool]) -> Problem:
        with self._plug.call(self._name, passing=(UserError,)):
            return _check_problem(self._generator.train_problem(position, accept))

    def held_out(self, count: int) -> Sequence[Problem]:
        with self._plug.call(self._name, passing=(UserError,)):
            problems = self._generator.held_out(count)
            if not isinstance(problems, Sequence):
                raise TypeError(f"held_out must return a sequence, not {type(problems).__name__}")
            return [_check_problem(problem) for problem in problems]


def _check_problem(problem: object) -> Problem:
    """Return a problem that a generator has made. Raise TypeError for something else."""
    if not isinstance(problem, Problem):
        raise TypeError(f"it returned {problem!r:.80}, not a Problem")
    if not all(isinstance(text, str) for text in (problem.id, problem.prompt, problem.answer)):
        raise TypeError("id, prompt and answer of a problem must be strings")
    "".join((problem.id, problem.prompt, problem.answer)).encode()  # raises here for a lone surrogate, not in the tokenizer
    check_own_chat(problem.history, problem.tools)
    check_columns(problem.columns)
    return problem


def check_generator(generator: ProblemGenerator, data: DataConfig, field: str) -> None:
    """Raise PlugError if the generator cannot make the first problems that `field` needs."""
    if field == "data.eval":
        generator.held_out(data.eval_size)
    else:
        generator.train_problem(0, lambda problem: True)
    _ = generator.fingerprint


def read_own_rows(source: DataSourceConfig, data: DataConfig, field: str) -> Iterator[tuple[int, object]]:
    """Yield (number from 1, copy of the row) for each row of the function. Raise UserError if the function fails."""
    rows, end = _call(lambda *given, **settings: iter(_load(source, field)(*given, **settings)), source, data, field), object()
    for number in itertools.count(1):
        try:
            row = next(rows, end)
            row = dict(row) if isinstance(row, Mapping) else row  # a function may fill the same object again
        except UserError:
            raise
        except Exception as error:  # the custom function may raise anything
            raise UserError(field, source.source, f"fails after {number - 1} rows ({describe_error(error)})", "correct it") from None
        if row is end:
            return
        yield number, row


def _load(source: DataSourceConfig, field: str) -> Any:
    with as_user_error():
        return replace(DATA_SOURCES, field=field).load(source.source)


def _call(plug: Callable[..., Any], source: DataSourceConfig, data: DataConfig, field: str, *arguments: object) -> Any:
    settings = copy.deepcopy(data.settings if source.settings is None else source.settings)
    try:
        return plug(*arguments, **settings)
    except UserError:
        raise
    except Exception as error:  # unknown settings, or any error of the custom code
        rule = f"cannot be called with the settings {settings} ({describe_error(error)})"
        raise UserError(field, source.source, rule, "correct data.settings or the settings of the source") from None
