"""A data source: the rows of a CSV file, which any format can read.

[[data.train]]
source = "examples.plugs.csv_rows:read_csv"
settings = { path = "data/questions.csv" }
format = "gsm8k"

A source that generates problems endlessly is a class; see examples/arithmetic/task.py.
"""

import csv
from collections.abc import Iterator


def read_csv(path: str, delimiter: str = ",") -> Iterator[dict[str, str]]:
    """Yield the rows, keyed by the names in the first line."""
    with open(path, newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file, delimiter=delimiter)
