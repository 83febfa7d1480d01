"""The project's expected errors, which print as one line without a traceback and without secrets. All other exceptions are bugs and keep
their traceback."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron_rl.redaction import redact
from parallel.plug import InputError, PlugError

_MOST_SHOWN = 160
"""Number of characters of a value or a field's name that an error line shows."""
_LONGEST_TEXT = 1000
"""Number of characters of a rule or a fix that an error line shows. Both may quote what a user or a library wrote."""


def shorten(text: str, most: int = _MOST_SHOWN) -> str:
    """Return a text of at most about `most` characters, with the middle of a longer one left out."""
    if len(text) <= most:
        return text
    end = most // 3
    return f"{text[: most - end]} ... ({len(text) - most:,} more characters) ... {text[-end:]}"


def quote(value: object) -> str:
    """Return a value as an error line shows it: a text in quotes, and nothing longer than about 160 characters."""
    try:
        return repr(shorten(value)) if isinstance(value, str) else shorten(str(value))
    except (ValueError, RecursionError):  # an integer of more digits than Python writes, or a value that is nested too deeply
        return f"a {type(value).__name__} that is too large to show"


def escape(text: str) -> str:
    """Return a text as one line: line breaks become spaces, and whatever cannot be printed becomes an escape such as \\x1b."""
    text = re.sub(r"\s*\n\s*", " ", text)  # messages of libraries and names in a user's files may have several lines
    return text if text.isprintable() else "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


class MegatronRLError(Exception):
    """Base class of expected errors. `exit_code` is the exit code of the command line."""

    exit_code = 1


class UserError(MegatronRLError):
    """Raised for invalid user input, with the field, its value, what is wrong, and the fix.

    Example: ``UserError("train.layout.tp", 3, "must divide num_key_value_heads (2)", "use 1 or 2")`` prints as
    ``train.layout.tp = 3: must divide num_key_value_heads (2); use 1 or 2``.
    """

    exit_code = 2

    def __init__(self, field: str, value: object, rule: str, fix: str = "", others: Sequence[UserError] = ()) -> None:
        """Make the error of one mistake. `others` are further mistakes of the same input, each of which is shown as one more line."""
        self.field, self.value, self.rule, self.fix, self.others = field, value, rule, fix, tuple(others)
        shown = "" if value is None else f" = {quote(value)}"
        line = f"{shorten(field)}{shown}: {shorten(rule, _LONGEST_TEXT)}" + (f"; {shorten(fix, _LONGEST_TEXT)}" if fix else "")
        super().__init__("\n".join([escape(redact(line)), *map(str, self.others)]))

    def __reduce__(self) -> tuple[object, ...]:  # for multiprocessing
        return UserError, (self.field, self.value, self.rule, self.fix, self.others)

    @classmethod
    def join(cls, errors: Sequence[UserError]) -> UserError:
        """Return one error that shows several mistakes, in order and each line once."""
        first, *others = {str(each): each for error in errors for each in (error.alone, *error.others)}.values()
        return cls(first.field, first.value, first.rule, first.fix, others) if others else first

    @property
    def alone(self) -> UserError:
        """The first mistake without the others."""
        return UserError(self.field, self.value, self.rule, self.fix) if self.others else self


class RunError(MegatronRLError):
    """Raised if a started run fails. Files written so far remain. `log_tail` contains the last log lines of the failed process."""

    exit_code = 3

    def __init__(self, message: str, log_tail: str = "") -> None:
        self.log_tail = redact(log_tail)
        super().__init__(redact(message))


class EngineLostError(RunError):
    """Raised if an engine or the connection to it is lost. The call can be repeated with a replacement engine."""


class MismatchError(RunError):
    """Raised if trainer and engine give a token other log-probs than the run allows."""


class DrawError(RunError):
    """Raised if an engine's tokens are not draws from the distribution that it reports."""


class AbortedError(Exception):
    """Raised if a call is ended by the caller's own `Abort`, so its result is not needed."""


_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOTCONN)


def find_os_error(error: BaseException | None) -> OSError | None:
    """Return the OSError that caused an error, or None: torch's and Megatron's writers wrap it in others."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def describe_disk_error(error: BaseException) -> str:
    """Return one line if a file could not be written because of the disk or a shared folder, such as a full one, or "" for other errors."""
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
