"""Runs of two ranks under torchrun that lose a rank or are told to stop: everything ends in bounded time, with a line that says why."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from support.processes import ROOT, Command, Done, alive_after, command_lines, family, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]  # two runs at a time

CHANGES = {  # over configs/quickstart.toml
    "model.warm_start.steps": 0,
    "model.create.num_hidden_layers": 1,
    "train.layout.tp": 2,
    "train.steps": 500,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 8,
    "rollout.max_running_requests": 16,
    "rollout.max_total_tokens": 4096,
    "rollout.start_timeout": 400,
    "data.eval": "",
    "reward.workers": 1,
    "sync.bucket_mb": 1,
}
LIMIT = 90.0
"""Seconds until all is over; torchrun itself kills after 30 what does not end by itself."""


def run_until(folder: Path, strike: str) -> tuple[Path, Done]:
    """After two steps rank 1 is killed, or torchrun gets a SIGTERM. Raises AssertionError when anything is left afterwards."""
    wanted = {**CHANGES, "model.path": folder / "model", "log.dir": folder / "runs"}
    overrides = [f"--{name}={value}" for name, value in wanted.items()]
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m", "megatron_rl", "train")
    with Command(folder, *launcher, ROOT / "configs" / "quickstart.toml", *overrides) as command:
        metrics = folder / "runs" / "latest" / "metrics.jsonl"
        until(lambda: command.ended() or (metrics.is_file() and len(metrics.read_text().splitlines()) >= 3), 500, "two steps")
        everything = family(command.pid)
        if strike == "kill a rank":
            next(process for process in everything if process.environ().get("RANK") == "1").kill()
        else:
            psutil.Process(command.pid).terminate()
        done = command.wait(LIMIT)
        assert command_lines(alive_after(everything, 5)) == {}
        return folder / "runs" / "latest", done


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, Done]]:
    with ThreadPoolExecutor(2) as pool:
        work = {strike: pool.submit(run_until, tmp_path_factory.mktemp("run"), strike) for strike in ("kill a rank", "stop")}
        return {strike: future.result() for strike, future in work.items()}


def test_a_rank_that_is_killed_ends_the_others_and_the_engine(runs):
    run, done = runs["kill a rank"]
    assert done.code != 0
    state = json.loads((run / "run.json").read_text())
    assert state["status"] == "broken" and state["reason"].startswith("another trainer rank is gone ("), state["reason"]
    assert f"megatron-rl: {state['reason']}" in done.err


def test_a_stop_leaves_a_checkpoint(runs):
    run, done = runs["stop"]
    assert done.code != 0
    state = json.loads((run / "run.json").read_text())
    assert (state["status"], state["reason"]) == ("broken", "stopped by SIGTERM"), done.err
    (checkpoint,) = (run / "checkpoints").glob("step_*")
    recorded = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert json.loads((checkpoint / "state.json").read_text())["step"] == recorded
