"""What a worker may answer. Only the process that owns the pool reads answers, so workers do not load pydantic."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

ResultT = TypeVar("ResultT")


class Answer(BaseModel, Generic[ResultT]):
    """The answer to the task `number`. An answer that does not follow this model is a worker's failure."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, val_json_bytes="base64")

    number: int
    error: str = ""
    """Why there is no result."""
    result: ResultT | None = None
    exhausted: bool = False
    """Whether the worker ran out of memory, threads or descriptors during the task."""
    grown: bool = False
    """Whether the task has left too much behind in the worker."""
    has_leftovers: bool = False
    """Whether threads of tasks still run in the worker."""


def make_reader(result_type: Any) -> Callable[[bytes], Answer[Any]]:
    """Return a function that reads an answer with a result of this type. It raises ValueError for anything else."""
    return Answer[result_type].model_validate_json
