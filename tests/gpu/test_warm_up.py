"""Compiles what the other tests will use, before their limits count: the products' shapes, the engines, a run's small model.

Nothing is judged here but that it runs; what is not compiled in time is compiled at its first use.
"""

import pytest
from test_engines import BATCH_SIZES, measure_decoding, start_decoders
from test_runs import train
from test_speed_linears import SHAPES, make_cases

pytestmark = pytest.mark.timeout(300)


def test_products_of_every_shape(device, backends):
    sizes = SHAPES.values() if device == "cuda" else [(256, 128)]
    for n, k in sizes:
        for call in make_cases(backends, device, 8192 if device == "cuda" else 64, n, k).values():
            call()


def test_engines_of_every_precision(device, tmp_path):
    with start_decoders(device, tmp_path) as engines:
        for engine in engines.values():
            assert all(measure_decoding(engine, size, tokens=2) > 0 for size in BATCH_SIZES)


@pytest.mark.gpu
def test_a_run_of_one_step(tmp_path):
    train("quickstart in fp8_unified", tmp_path, seconds=280, **{"warm_start.steps": 0, "train.steps": 1})
