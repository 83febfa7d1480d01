"""A run ahead of its trainer, whose engines and trainer are killed at random, trains once on every problem, in order and to the bit."""

import pytest
from support.processes import run_tool

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]
SETTINGS = {
    "warm_start.steps": 80, "warm_start.batch_size": 16, "placement.kind": "disaggregated", "placement.max_staleness": 2,
    "algorithm.correction": "tis", "rollout.engines": 2, "rollout.over_sampling_prompts": 1, "rollout.prompts_per_step": 6,
    "rollout.group_size": 4, "rollout.max_running_requests": 16, "rollout.max_total_tokens": 4096, "rollout.start_timeout": 900,
    "rollout.request_timeout": 900, "sync.running": "continue", "data.eval_every": 100, "data.eval_size": 8, "reward.workers": 1,
}  # fmt: skip


def test_no_sample_is_lost_or_counted_twice(tmp_path):
    options = ["--steps=16", "--kills=6", "--every=2", "--seed=2", *(f"--{name}={value}" for name, value in SETTINGS.items())]
    done = run_tool("soak", "--folder", tmp_path, *options, seconds=5000)
    console = tmp_path / "fired" / "console.log"
    assert done.returncode == 0, done.stdout + done.stderr + (console.read_text()[-3000:] if console.exists() else "")
    *kills, last = [line for line in done.stdout.splitlines() if line.startswith(("step", "every problem"))]
    assert last == "every problem was trained on once, in order; no mismatch"
    assert {line.split(": ")[1].split(" killed")[0] for line in kills} == {"engine", "all engines", "trainer"}
