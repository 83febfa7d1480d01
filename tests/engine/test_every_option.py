"""Every documented value of the configuration is taken through a real run, together with every value of the others that it may meet."""

import itertools

import pytest
from support.covering import config_name, list_factors, load, merge, read_array
from support.train_command import TORCHRUN, finish, latest, read_rows, train

from megatron_rl.training.canary import promises_exactness

pytestmark = pytest.mark.timeout(6000)
ROWS = read_array()
LARGEST = 2.0
"""Nats by which a log-prob of the engine may differ if the engine alone is quantized, or sums in another order."""


def test_the_array_has_every_value_and_every_row_is_accepted(tmp_path):
    """A new enumeration, or a new value of one, needs `python -m support.covering`."""
    factors = list_factors()
    assert all(row.keys() == factors.keys() for row in ROWS)
    assert {name: {row[name] for row in ROWS} for name in factors} == {name: set(values) for name, values in factors.items()}
    pairs = set(itertools.chain.from_iterable(itertools.combinations(row.items(), 2) for row in ROWS))
    assert len(pairs) > 5000
    for row in ROWS[:: max(1, len(ROWS) // 8)]:
        load(row, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_two_steps(number, tmp_path):
    row = ROWS[number]
    changes = merge(row, tmp_path)
    done = finish(train(tmp_path, changes, launcher=TORCHRUN if row["trainer"] != "one rank" else (), config=config_name(row)))
    assert done.code == 0, f"{row}\n{done.err}"
    steps = read_rows(latest(tmp_path))[1:]
    assert len(steps) == 2 and all(step["sync/proved"] == step["sync/tensors"] > 0 for step in steps)
    masked = row["algorithm.mask_truncated_completions"] == "true"  # a random model rarely stops, so nothing may be left
    assert all(step["grad_norm"] > 0 or masked for step in steps), "nothing is learned"
    bound = 0 if promises_exactness(*load(row, tmp_path)) else LARGEST
    compared = [step["mismatch/abs_max"] for step in steps if "mismatch/abs_max" in step]  # tokens of older versions are not compared
    assert max(compared, default=0) <= bound and len(compared) == (1 if row["ahead"] == "one step" else 2), row
