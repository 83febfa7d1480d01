"""A run that is stopped and started again by the same command, and one whose engine is killed, end as the run that nothing happened to:
same rows, same bytes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import torch
from support.models import read_weights
from support.processes import ROOT, Command, Done, alive_after, command_lines, end, family, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # five starts of an engine, two at a time

SMALL = {  # over configs/quickstart.toml
    "model.warm_start.batch_size": 16,
    "model.warm_start.steps": 80,  # so that some answers earn something, and the weights move
    "model.create.num_hidden_layers": 1,
    "train.steps": 4,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 8,
    "rollout.max_running_requests": 16,
    "rollout.max_total_tokens": 4096,
    "rollout.start_timeout": 200,
    "data.levels": "[1]",
    "data.eval_size": 4,
    "reward.workers": 1,
    "sync.bucket_mb": 1,
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
    "checkpoint.resume": "auto",
}


def train(folder: Path) -> Command:
    wanted = {**SMALL, "model.path": folder / "model", "log.dir": folder / "runs"}
    return Command(folder, "megatron_rl", "train", ROOT / "configs" / "quickstart.toml", *(f"--{name}={wanted[name]}" for name in wanted))


def finish(command: Command, seconds: float = 300) -> Done:
    with command:
        return command.wait(seconds)


def stop_and_start_again(folder: Path) -> tuple[Done, Done]:
    """SIGTERM after two steps, then the same command; nothing of the first may be left."""
    with train(folder) as command:
        metrics = folder / "runs" / "latest" / "metrics.jsonl"
        until(lambda: command.ended() or (metrics.is_file() and len(metrics.read_text().splitlines()) >= 3), 400, "two steps")
        everything = family(command.pid)
        psutil.Process(command.pid).terminate()
        stopped = command.wait(60)
        assert command_lines(alive_after(everything, 5)) == {}
    return stopped, finish(train(folder))


def kill_the_engine(folder: Path) -> Done:
    """Kills the engine's server after one step."""
    with train(folder) as command:
        metrics = folder / "runs" / "latest" / "metrics.jsonl"
        until(lambda: command.ended() or (metrics.is_file() and len(metrics.read_text().splitlines()) >= 2), 400, "a step")
        end(process for process, words in command_lines(family(command.pid)).items() if "rollout_sglang.server" in words)
        return command.wait(300)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {name: tmp_path_factory.mktemp(name) for name in ("straight", "broken", "killed")}


@pytest.fixture(scope="module")
def killed(folders) -> tuple[Path, Done]:
    return folders["killed"] / "runs" / "latest", kill_the_engine(folders["killed"])


@pytest.fixture(scope="module")
def runs(folders) -> tuple[Path, Path, Done, tuple[Done, Done]]:
    straight, broken = folders["straight"], folders["broken"]
    with ThreadPoolExecutor(2) as pool:
        one, two = pool.submit(lambda: finish(train(straight))), pool.submit(stop_and_start_again, broken)
        return straight / "runs" / "latest", broken / "runs" / "latest", one.result(), two.result()


def rows(run: Path) -> list[dict]:
    """What is no time."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = ("time", "second", "memory/", "restarts")
    return [{key: value for key, value in row.items() if not any(word in key for word in measured)} for row in found]


def test_the_rows_are_those_of_the_run_that_was_not_stopped(runs):
    straight, broken, done, (stopped, again) = runs
    assert (done.code, stopped.code, again.code) == (0, 143, 0), (done.err, stopped.err, again.err)
    assert len(list(broken.parent.glob("20*"))) == 1, "it goes on in its own folder"
    assert rows(broken) == rows(straight)
    assert [row["step"] for row in rows(broken)] == [0, 1, 2, 3, 4]
    assert rows(broken)[4]["grad_norm"] > 0 and rows(broken)[4]["sync/proved"] == 15
    assert sum(row["reward/std"] > 0 for row in rows(broken)[1:]) >= 2
    samples = [[json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()] for run in (straight, broken)]
    assert samples[0] == samples[1] and len(samples[0]) == 4 * 8


def test_the_engines_bytes_are_those_of_the_run_that_nothing_happened_to(runs, killed, tmp_path):
    for number, run in enumerate([*runs[:2], killed[0]]):
        assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == ["step_00003", "step_00004"]
        wanted = ("--checkpoint", run / "checkpoints" / "step_00004", "--output", tmp_path / str(number), "--precision", "fp8")
        done = finish(Command(tmp_path / f"log{number}", "megatron_rl", "export", *wanted))
        assert done.code == 0, done.err
    straight, *others = (read_weights(tmp_path / str(number)) for number in range(3))
    for other in others:
        assert len(straight) == 21 and straight.keys() == other.keys()
        assert [name for name in straight if not torch.equal(straight[name].view(torch.uint8), other[name].view(torch.uint8))] == []


def test_a_run_whose_engine_is_killed_has_the_same_rows_and_says_what_it_lost(runs, killed):
    straight, (run, done) = runs[0], killed
    assert done.code == 0, done.err
    assert rows(run) == rows(straight)
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum(row["engine/restarts"] for row in told) == 1 and sum(row["time/recovery"] for row in told) > 1
    log = (run / "run.log").read_text()
    assert "engine 0 is lost: " in log and "again, proved, " in log


def test_the_run_tells_how_it_went_on(runs):
    _, broken, _, (_, again) = runs
    run = json.loads((broken / "run.json").read_text())
    assert run["status"] == "finished" and [part["step"] >= 2 for part in run["resumed"]] == [True]
    assert "going on from" in (broken / "run.log").read_text() and "going on from" in again.out + again.err
    assert len(list((broken / "tensorboard").glob("events.out.tfevents.*"))) == 2
