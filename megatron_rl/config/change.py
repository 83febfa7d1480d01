"""What a change of a field moves in a run that is resumed. A `Change` stands in the annotation of a field, which may hold a whole section,
or as `on_resume` of a section for all of its other fields."""

from dataclasses import dataclass
from enum import StrEnum


class MayChange(StrEnum):
    """Condition under which a field may change."""

    FREELY = "freely"
    EQUAL = "if equal"  # the content that it names is compared, and may only differ if the field is named
    NAMED = "if named"  # in checkpoint.allow_changes
    NEVER = "never"


@dataclass(frozen=True)
class Change:
    may_change: MayChange
    reason: str  # what a change moves


FREELY, EQUAL, NAMED, NEVER = MayChange
NO_RESULT = Change(FREELY, "Changes no result.")
EVALUATION = "Metrics of evaluations before and after the change cannot be compared."
LIMITS = Change(FREELY, "Changes no result, except that of a completion which exceeds the limit.")
