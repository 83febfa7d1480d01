"""The project's expected errors, which print as one line without a traceback and without secrets. All other exceptions are bugs and keep
their traceback."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.redaction import redact
from parallel.plug import InputError, PlugError

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
        text = redact(f"{field}{shown}: {rule}" + (f"; {fix}" if fix else ""))
        # messages of libraries and names in a user's files may have several lines
        super().__init__(re.sub(r"\s*\n\s*", " ", text).translate(_ESCAPED))

    def __reduce__(self) -> tuple[object, ...]:  # errors are pickled between ranks
        return UserError, (self.field, self.value, self.rule, self.fix)


class RunError(MegatronRLError):
    """Raised if a started run fails. Files written so far remain. `log_tail` contains the last log lines of the failed process."""

    exit_code = 3

    def __init__(self, message: str, log_tail: str = "") -> None:
        self.log_tail = redact(log_tail)
        super().__init__(redact(message))


class EngineLostError(RunError):
    """Raised if an engine or the connection to it is lost. The call can be repeated with a replacement engine."""


class AbortedError(Exception):
    """Raised if a call is ended by the caller's own `Abort`, so its result is not needed."""


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def find_os_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that caused an error, or None: torch's and Megatron's writers wrap it in others."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def describe_disk_error(error: BaseException) -> str:
    """Return one line if a file could not be written because of the disk, such as a full one, or "" for other errors."""
    cause = find_os_error(error)
    if cause is not None and cause.errno in _DISK_ERRORS:
        return f"{cause.strerror} ({cause.filename})" if cause.filename else str(cause.strerror)
    is_writer = isinstance(error, RuntimeError) and re.search(r"PytorchStreamWriter|inline_container|iostream error", str(error))
    return f"a file could not be written ({str(error).splitlines()[0]})" if is_writer else ""  # torch's writer hides the reason


@contextmanager
def as_run_error() -> Iterator[None]:
    """Convert an OSError, such as a full disk, and the failure of a user's own object to a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{error.strerror or error} ({error.filename})") from None
    except PlugError as error:
        raise RunError(str(error)) from None


@contextmanager
def as_user_error() -> Iterator[None]:
    """Convert an InputError of `parallel`, and the failure of a user's own object before a run, to a UserError."""
    try:
        yield
    except InputError as error:
        raise UserError(error.field, error.value, error.rule, error.fix) from None
    except PlugError as error:
        raise UserError(error.field, error.name, error.reason, "see docs/extending.md") from None
