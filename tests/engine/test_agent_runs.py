"""Runs of agents that fail at random: uninterrupted, with a killed engine, and stopped and resumed. Each counts every episode once."""

import os
from pathlib import Path

import pytest
from support import train_command
from support.train_command import finish, latest, read_numbers, read_rows, train

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]
BREAKING = {
    "agent.name": "support.agent_programs:break_at_random", "agent.tool_parser": "", "reward.function": "support.agent_programs:judge",
    "reward.max_error_share": 1.0,
    "rollout.max_new_tokens": 32, "train.steps": 4, "data.eval_every": 2, "log.samples": 8, "checkpoint.every": 1,
    "checkpoint.resume": "auto",
}  # fmt: skip


def drop_draws(rows):
    """Return the rows without statistics of draws, whose sums over the last steps begin again in a resumed run."""
    return [{key: value for key, value in row.items() if not key.startswith("draws/")} for row in rows]


def test_no_episode_is_lost_or_counted_twice(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    folders = {name: tmp_path / name for name in ("straight", "killed", "stopped")}
    for folder in folders.values():
        folder.mkdir()
    codes = [finish(train(folders["straight"], BREAKING, config="tool_agent")).code]
    for name, strike in (("killed", train_command.kill_engine), ("stopped", train_command.terminate)):
        with train(folders[name], BREAKING, config="tool_agent") as command:
            train_command.wait_for_rows(command, folders[name], 2)
            strike(command)
            codes.append(command.wait(train_command.LONG).code)
    codes.append(finish(train(folders["stopped"], BREAKING, config="tool_agent")).code)
    assert codes == [0, 0, 143, 0]
    straight, killed, stopped = (latest(folder) for folder in folders.values())
    rows = read_numbers(straight)
    assert rows == read_numbers(killed)
    assert drop_draws(rows) == drop_draws(read_numbers(stopped))
    assert sum(row["engine/restarts"] for row in read_rows(killed)) == 1
    samples = read_rows(straight, "samples.jsonl")
    assert samples == read_rows(killed, "samples.jsonl") == read_rows(stopped, "samples.jsonl") and len(samples) == 4 * 8
    trained = rows[1:]
    assert all(row["agent/errors"] == row["reward/errors"] for row in trained) and sum(row["agent/errors"] for row in trained) > 0
    assert all(1 < row["agent/conversations"] <= 2 and row["mismatch/abs_max"] == 0 for row in trained)
    assert sum(row["reward/std"] > 0 for row in trained) == 4 and trained[-1]["grad_norm"] > 0
