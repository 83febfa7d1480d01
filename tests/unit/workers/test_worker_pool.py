"""The pool of reward workers: order, and samples that hang, raise, crash or exhaust memory."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from support.processes import alive_after

from megatron_rl.config.data import DataConfig, DataSourceConfig
from megatron_rl.data.sets import read_set
from megatron_rl.errors import RunError
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.types import Problem, Reward
from megatron_rl.workers import pool as worker_pool

GSM8K_TEST = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "gsm8k" / "test.jsonl"
MEMORY_MB = 2048

HOSTILE = "support.hostile:reward"


def pool_of(name: str, workers: int, timeout: float, memory_mb: int = MEMORY_MB) -> RewardPool:
    return RewardPool([(name, {})], workers, timeout, memory_mb)


def judged(pool: RewardPool, texts: list[str], problems: list[Problem]) -> list[Reward]:
    return [reward for [reward] in pool.score(texts, problems)]


def worker_pid(pool: RewardPool) -> int:
    [reward] = judged(pool, ["pid"], _problems(1))
    assert reward.correct
    return int(reward.value)


def _problems(count: int) -> list[Problem]:
    return [Problem(str(index), "?", str(index)) for index in range(count)]


def test_rewards_come_in_order_and_the_timeout_counts_for_each_sample_not_for_its_chunk():
    problems = _problems(300)
    texts = [f"#{problem.answer}" if index % 3 else "#-1" for index, problem in enumerate(problems)]
    with pool_of("examples.arithmetic.reward:reward", 3, 5.0) as pool:
        for _ in range(2):
            assert [reward.correct for reward in judged(pool, texts, problems)] == [bool(index % 3) for index in range(300)]
        assert judged(pool, [], []) == []
    with pool_of(HOSTILE, 1, 1.5) as pool:
        rewards = judged(pool, ["slow"] * 8, _problems(8))
    assert [reward.error for reward in rewards] == [""] * 8


@pytest.mark.parametrize("text, error", [
    ("hang", "timeout after 0.5 s"),
    ("hang in C", "timeout after 0.5 s"),
    ("killed", "worker died (signal 9)"),
    ("hard exit", "worker died (exit code 7)"),
    ("raise", "ValueError: no verdict"),
    ("exit", "SystemExit: 3"),
    ("memory", "MemoryError"),
    ("wrong type", "TypeError: the reward function must return a Reward or a number, not str"),
    ("nan", "ValueError: the reward function returned nan"),
])  # fmt: skip
def test_a_bad_sample_costs_only_itself(text, error):
    problems = _problems(40)
    texts = [problem.answer for problem in problems]
    texts[5] = texts[23] = text
    with pool_of(HOSTILE, 2, 0.5 if "timeout" in error else 20.0) as pool:  # a busy machine must not look like a hanging sample
        rewards = judged(pool, texts, problems)
        assert rewards[5] == rewards[23] == Reward(0.0, False, error)
        assert [reward for number, reward in enumerate(rewards) if number not in (5, 23)] == [Reward(1.0, True)] * 38
        assert judged(pool, ["0"], problems[:1])[0].correct


def test_a_worker_imports_little_ignores_ctrl_c_and_costs_no_sample_if_it_is_killed_while_idle():
    with pool_of(HOSTILE, 1, 5.0) as pool:
        pid = worker_pid(pool)
        os.kill(pid, signal.SIGINT)
        modules = judged(pool, ["modules"], _problems(1))[0].error.split(",")
        assert not {"torch", "numpy", "pydantic", "transformers", "sympy"} & set(modules)
        assert worker_pid(pool) == pid
        os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        successor = worker_pid(pool)
        assert successor != pid
    with pytest.raises(ProcessLookupError):
        os.kill(successor, 0)  # closing ends the workers


def test_workers_outlive_the_thread_that_started_them():
    pool, found = pool_of(HOSTILE, 4, 5.0), list[psutil.Process]()

    def start() -> None:
        pool.__enter__()
        pool.wait_until_ready()
        found.extend(psutil.Process().children(recursive=True))

    thread = threading.Thread(target=start)  # Linux's parent-death signal comes when the starting thread ends
    thread.start()
    thread.join()
    with pool:
        assert len(found) >= 8 and len(alive_after(found, 0)) == len(found), "four workers and their keepers"
        assert all(reward.correct for reward in judged(pool, [str(index) for index in range(64)], _problems(64)))


def keep_a_worker_busy(pid: Connection) -> None:
    """Run in a separate process: send the worker's pid, then wait for a sample that hangs."""
    with pool_of(HOSTILE, 1, 60.0) as pool:
        pid.send(worker_pid(pool))
        judged(pool, ["hang"], _problems(1))


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_a_busy_worker_dies_with_its_parent():
    context = multiprocessing.get_context("spawn")
    receiver, parent_end = context.Pipe(duplex=False)
    parent = context.Process(target=keep_a_worker_busy, args=(parent_end,))
    parent.start()
    worker = psutil.Process(receiver.recv())
    time.sleep(0.3)
    parent.kill()
    parent.join(60)
    assert alive_after([worker], 60) == []


def test_workers_that_cannot_load_their_function_or_start_break_the_run(tmp_path, monkeypatch):
    with pytest.raises(
        RunError, match="2048 MiB could not load its functions: cannot be imported .ModuleNotFoundError: No module named 'absent'"
    ):
        with pool_of("absent:reward", 1, 5) as pool:
            judged(pool, ["#1"], _problems(1))
    (tmp_path / "suicidal_reward.py").write_text("import os; os._exit(9)")
    monkeypatch.syspath_prepend(tmp_path)
    exits = pool_of("suicidal_reward:reward", 2, 5.0)
    with pytest.raises(RunError, match=r"reward workers do not start: worker died \(exit code 9\)"), exits as pool:
        judged(pool, ["#1"], _problems(1))


def test_math_verify_runs_in_the_workers_and_hostile_mathematics_is_bounded():
    texts = [r"\boxed{\frac{2}{4}}", r"\boxed{(10^9)!}", r"\boxed{\frac{1}{2}}"]
    with pool_of("math", 1, 2.0) as pool:
        rewards = judged(pool, texts, [Problem("p", "?", r"\frac{1}{2}")] * 3)
    assert [reward.correct for reward in rewards] == [True, False, True]


@pytest.mark.long
@pytest.mark.skipif(not GSM8K_TEST.is_file(), reason="needs the data sets in ../shared/data")
def test_real_gsm8k_golds_verify_in_the_pool():
    problems = read_set(DataSourceConfig(source=str(GSM8K_TEST)), DataConfig(format="gsm8k"), "data.eval").problems
    texts = [json.loads(line)["answer"] for line in GSM8K_TEST.read_text().splitlines()]
    with pool_of("math", 2, 5.0) as pool:
        assert all(reward.correct for reward in judged(pool, texts, problems))


def test_the_first_task_of_each_worker_may_take_as_long_as_a_start(tmp_path, monkeypatch):
    """A worker loads something in its first call for each set, which takes longer than the timeout. One that dies loads it again."""
    (tmp_path / "loading_reward.py").write_text(
        "import os, time\nloaded = set()\ndef reward(text, problem):\n    problem.source in loaded or time.sleep(1.2)\n"
        "    loaded.add(problem.source)\n    if text == 'die': os._exit(7)\n    if text == 'hang': time.sleep(99)\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    texts = ["a"] * 20
    texts[4], texts[12] = "die", "hang"
    with pool_of("loading_reward:reward", 2, 0.6) as pool:
        rewards = judged(pool, texts, [replace(problem, source="ab"[number > 15]) for number, problem in enumerate(_problems(20))])
    assert {number: reward.error for number, reward in enumerate(rewards) if reward.error} == {
        4: "worker died (exit code 7)",
        12: "timeout after 0.6 s",
    }


@pytest.mark.long
def test_first_tasks_that_hang_take_half_as_long_each_time(monkeypatch):
    monkeypatch.setattr(worker_pool, "START_TIMEOUT", 4.0)
    with pool_of(HOSTILE, 1, 0.5) as pool:
        rewards = judged(pool, ["hang"] * 6 + ["6"], _problems(7))
    assert [reward.error for reward in rewards] == [f"timeout after {limit} s" for limit in ("4", "2", "1", *["0.5"] * 3)] + [""]
