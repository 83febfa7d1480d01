"""The table of docs/reference/resume.md, made of the rules at the configuration's fields. To write it: `python -m support.resume_page`."""

from itertools import groupby
from pathlib import Path

from megatron_rl.preflight.resume_rules import CHANGES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "resume.md"
HEAD = "| section | fields | may change | what a change moves |\n|---|---|---|---|\n"


def make_table() -> str:
    """Return the rows: fields of a section with the same rule are in one row, at the place of the first of them."""
    rows: dict[tuple, list[str]] = {}
    for section, fields in groupby(CHANGES, lambda field: field.rpartition(".")[0]):
        for field in fields:
            rows.setdefault((section, CHANGES[field]), []).append(f"`{field.rpartition('.')[2]}`")
    return "".join(f"| `{part}` | {' '.join(names)} | {rule.may_change} | {rule.reason} |\n" for (part, rule), names in rows.items())


def write_page() -> str:
    """Return the page with a new table, which is its last part."""
    return PAGE.read_text().split(HEAD)[0] + HEAD + make_table()


if __name__ == "__main__":
    PAGE.write_text(write_page())
