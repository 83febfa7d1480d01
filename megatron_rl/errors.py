"""The project's exceptions: one family, two exit codes.

`UserError` is a mistake in what the user gave (exit code 2); `RunError` is a run that broke (exit code 3), and `EngineLostError` one that a
new engine may repair. Both print as one line without a traceback; every other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parallel.plug import InputError


class MegatronRLError(Exception):
    """Base of all expected errors. `exit_code` is what the command line returns."""

    exit_code = 1


class UserError(MegatronRLError):
    """Bad input: names the field, the value, the rule it breaks and the fix, in one line.

    Example: ``UserError("train.layout.tp", 3, "must divide num_key_value_heads (2)", "use 1 or 2")`` prints as
    ``train.layout.tp = 3: must divide num_key_value_heads (2); use 1 or 2``.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, rule: str, fix: str = "") -> None:
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        shown = "" if value is None else f" = {value!r}" if isinstance(value, str) else f" = {value}"
        super().__init__(f"{field}{shown}: {rule}" + (f"; {fix}" if fix else ""))

    def __reduce__(self) -> tuple[object, ...]:  # errors travel between ranks
        return UserError, (self.field, self.value, self.rule, self.fix)


class RunError(MegatronRLError):
    """A run that broke after it had started: what was written stays, and `log_tail` shows the failed part's last lines."""

    exit_code = 3

    def __init__(self, message: str, log_tail: str = "") -> None:
        self.log_tail = log_tail
        super().__init__(message)


class EngineLostError(RunError):
    """An engine, or the connection to one, was lost. The call can be repeated with an engine that takes its place."""


class AbortedError(Exception):
    """The caller's own `Abort` ended a call: nobody waits for its result."""


@contextmanager
def as_run_error() -> Iterator[None]:
    """Turn an OSError, such as that of a full disk, into a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.strerror or error} ({error.filename})") from None


@contextmanager
def as_user_error() -> Iterator[None]:
    """Turn an InputError of `parallel` into a UserError."""
    try:
        yield
    except InputError as error:
        raise UserError(error.field, error.value, error.rule, error.fix) from None
