"""A run with the user's own loss, advantages, transport and tracker, with a real engine."""

import pytest
from support import train_command
from support.train_command import finish, read_rows

PLUGS = {
    "algorithm.loss": "examples.plugs.sapo:token_losses",
    "algorithm.loss_settings.tau_negative": 1.1,
    "algorithm.advantage": "examples.plugs.group_median:group_median",
    "sync.transport": "examples.plugs.tcp:TRANSPORT",
    "log.trackers": '["examples.plugs.csv_tracker:CsvTracker"]',
}


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_a_run_with_plugs_of_ones_own(tmp_path):
    done = finish(train_command.train(tmp_path, PLUGS))
    assert done.code == 0, done.err
    run = train_command.latest(tmp_path)
    rows = read_rows(run)
    assert [row["sync/proved"] == row["sync/tensors"] > 0 for row in rows] == [True] * 3
    lines = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()[1:]]
    recorded = {(int(step), name): float(value) for step, name, value in lines}
    assert recorded == {(row["step"], name): row[name] for row in rows for name in row.keys() - {"step", "unix_time"}}
    assert not (run / "tensorboard").exists()
