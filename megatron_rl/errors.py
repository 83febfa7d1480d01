"""The project's expected errors, which print as one line without a traceback. All other exceptions are bugs and keep their traceback."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from parallel.plug import InputError

_ESCAPED = {ord(character): repr(character)[1:-1] for character in "\r\0"}


class MegatronRLError(Exception):
    """Base class of expected errors. `exit_code` is the exit code of the command line."""

    exit_code = 1


class UserError(MegatronRLError):
    """Raised for invalid user input, with the field, its value, what is wrong, and the fix.

    Example: ``UserError("train.layout.tp", 3, "must divide num_key_value_heads (2)", "use 1 or 2")`` prints as
    ``train.layout.tp = 3: must divide num_key_value_heads (2); use 1 or 2``.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, rule: str, fix: str = "") -> None:
        self.field, self.value, self.rule, self.fix = field, value, rule, fix
        shown = "" if value is None else f" = {value!r}" if isinstance(value, str) else f" = {value}"
        text = f"{field}{shown}: {rule}" + (f"; {fix}" if fix else "")
        # messages of libraries and names in a user's files may have several lines
        super().__init__(re.sub(r"\s*\n\s*", " ", text).translate(_ESCAPED))

    def __reduce__(self) -> tuple[object, ...]:  # errors are pickled between ranks
        return UserError, (self.field, self.value, self.rule, self.fix)


class RunError(MegatronRLError):
    """Raised if a started run fails. Files written so far remain. `log_tail` contains the last log lines of the failed process."""

    exit_code = 3

    def __init__(self, message: str, log_tail: str = "") -> None:
        self.log_tail = log_tail
        super().__init__(message)


class EngineLostError(RunError):
    """Raised if an engine or the connection to it is lost. The call can be repeated with a replacement engine."""


class AbortedError(Exception):
    """Raised if a call is ended by the caller's own `Abort`, so its result is not needed."""


@contextmanager
def as_run_error() -> Iterator[None]:
    """Convert an OSError, such as a full disk, to a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.strerror or error} ({error.filename})") from None


@contextmanager
def as_user_error() -> Iterator[None]:
    """Convert an InputError of `parallel` to a UserError."""
    try:
        yield
    except InputError as error:
        raise UserError(error.field, error.value, error.rule, error.fix) from None
