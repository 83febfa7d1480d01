from types import SimpleNamespace

import pytest

from megatron_rl.config import TrainConfig
from megatron_rl.mcore.optim.optimizer import LearningRateSchedule


@pytest.mark.parametrize(
    "fields, rates",
    [
        ({}, [8, 8, 8, 8, 8, 8]),
        ({"warmup_steps": 4}, [2, 4, 6, 8, 8, 8]),
        ({"decay_style": "linear", "decay_steps": 4}, [8, 6, 4, 2, 0, 0]),
        ({"decay_style": "linear", "decay_steps": 4, "min_learning_rate": 4}, [8, 7, 6, 5, 4, 4]),
        ({"decay_style": "linear", "warmup_steps": 2}, [4, 8, 8, 6, 4, 2]),
        ({"decay_style": "cosine", "decay_steps": 4}, [8, 4 + 8**0.5, 4, 4 - 8**0.5, 0, 0]),
        ({"decay_style": "WSD", "wsd_decay_steps": 2}, [8, 8, 8, 8, 8, 4]),
    ],
)
def test_the_learning_rate_warms_up_and_falls(fields, rates):
    optimizer = SimpleNamespace(param_groups=[])
    schedule = LearningRateSchedule(optimizer, TrainConfig(learning_rate=8.0, **fields).decay_over(6))
    assert [schedule(done) for done in range(6)] == pytest.approx(rates)
    assert schedule(3) == pytest.approx(rates[3]), "it has no state"
