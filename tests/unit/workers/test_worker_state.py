"""What a completion leaves behind in its worker, or writes on the worker's socket, costs no other completion; nothing of a worker stays."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
from support.processes import alive_after, but_trackers

from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rollout.environments.pool import EnvironmentPool
from megatron_rl.types import Episode, Problem, Reward
from megatron_rl.workers import keeper

SAMPLES, BAD = 24, (0, 5, 6, 17)


def pool_of(timeout: float = 30.0, workers: int = 1) -> RewardPool:
    return RewardPool([("support.spoiling:reward", {})], workers, timeout, 1024)


def score(pool: RewardPool, *texts: str) -> list[Reward]:
    problems = [Problem(str(number), "?", text) for number, text in enumerate(texts)]
    return [reward for [reward] in pool.score(texts, problems)]


@pytest.fixture
def touched(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SPOILING_FILE", str(tmp_path / "touched"))
    return tmp_path / "touched"


@pytest.mark.default_cases(4)
@pytest.mark.parametrize("misdeed, error", [
    ("fill memory", ""),
    ("fill memory until it fails", "MemoryError"),
    ("start threads", ""),
    ("open files", ""),
    ("open files until it fails", "OSError: [Errno 24] Too many open files: '/dev/null'"),
    ("close descriptors", ""),
    ("close all descriptors", "worker died (exit code 1)"),
    ("close standard output", ""),
    ("close descriptor 1", ""),
    ("print", ""),
    ("print errors", ""),
    ("half a message", "what came from the worker is no answer (too large)"),  # its end is taken from the answer
    ("half a message later", None),
    ("a foreign message", "what came from the worker is no answer (too large)"),
    ("a foreign frame", "what came from the worker is no answer (malformed)"),
    ("a foreign frame later", None),
    ("a pickle", "what came from the worker is no answer (malformed)"),
    ("nested brackets", "what came from the worker is no answer (malformed)"),
    ("a flood of frames", "what came from the worker is no answer (malformed)"),
    ("an early answer", "the worker answered out of turn"),
    ("an answer of nan", "what came from the worker is no answer (malformed)"),
    ("exit later", None),
    ("an alarm later", None),
    ("fork, and return twice", ""),
    ("leave a child", ""),
    ("leave a daemon", ""),
    ("kill the keeper", None),
    ("return a pickle that acts", ""),
    ("a long answer", "the answer cannot be sent: FrameError: 128 MiB, and a message has at most 64 MiB"),
    ("half a character", ""),
    ("change the folder", ""),
    ("remove its folder", ""),
    ("limit the recursion", ""),
    ("an infinite number", "OverflowError: int too large to convert to float"),
])  # fmt: skip
def test_what_a_sample_leaves_behind_costs_no_other_sample(misdeed, error, touched, descendants):
    texts = [misdeed if number in BAD else f"right {number}" for number in range(SAMPLES)]
    with pool_of() as pool:
        rewards = score(pool, *texts)
    assert {number: reward.error for number, reward in enumerate(rewards) if reward.error and number not in BAD} == {}
    assert [reward.answer for number, reward in enumerate(rewards) if number not in BAD] == [text for text in texts if text != misdeed]
    if error is not None:  # what happens later may hit the sample itself
        assert [rewards[number].error for number in BAD] == [error] * len(BAD)
    assert not touched.exists(), "nothing that comes from a worker is unpickled"
    assert alive_after(descendants(), 60) == []


def test_an_environment_costs_no_other_episode_and_its_state_is_unpickled_only_in_workers(touched):
    texts = ["a", "hold a pickle that acts", "fill memory", "a foreign frame", "open files", "exit later", "hold too much", *["b"] * 9]
    with EnvironmentPool(EnvironmentConfig(name="support.spoiling:Environment", workers=1, timeout=30, memory_mb=1024)) as pool:
        replies = pool.step([(text, "") for text in texts], [Episode(str(number), "", "") for number in range(len(texts))])
        assert {number: reply.error for number, reply in enumerate(replies) if reply.error} == {
            2: "MemoryError",
            3: "what came from the worker is no answer (malformed)",
            6: f"the answer cannot be sent: FrameError: {4 * 128 // 3 + 1} MiB, and a message has at most 64 MiB",
        }
        said = [text for number, text in enumerate(texts) if number not in (2, 3, 6)]
        assert [reply.message.text for reply in replies if reply.message] == said
        assert not touched.exists()
        (again,) = pool.step([("c", "")], [Episode("1", "", "", turn=1, state=replies[1].state)])
    assert again.message.text == "c" and touched.exists(), "a worker has unpickled it"


def test_a_hanging_sample_with_half_a_message_ends_at_its_time_limit():
    with pool_of(timeout=2.0) as pool:
        rewards = score(pool, "a", "half a message, then hang", "b")
    assert [reward.answer for reward in rewards] == ["a", None, "b"] and rewards[1].error.startswith("timeout after ")


def test_a_worker_keeps_what_the_first_sample_of_a_set_loads_and_a_few_threads():
    with pool_of() as pool:
        first = worker_of(pool)
        score(pool, "leave a few threads", "a", "b")
        assert worker_of(pool) == first


def test_a_worker_outlives_the_thread_that_had_it_started_in_the_middle_of_a_sample():
    """A worker that is replaced during an evaluation serves training afterwards."""
    with pool_of() as pool:
        evaluation = threading.Thread(target=score, args=(pool, "a", "exit later", *["b"] * 20))
        evaluation.start()
        evaluation.join()
        worker = worker_of(pool)
        time.sleep(1.0)
        assert worker_of(pool) == worker


FORKING = ["leave a child", "leave a daemon", "fork, and return twice"]


@pytest.mark.parametrize("end", ["close", "kill"])
def test_what_a_worker_forked_ends_with_it(end, descendants):
    with pool_of() as pool:
        score(pool, "a", *FORKING)
        before = descendants()
        assert len(before) >= 4
        if end == "kill":
            os.kill(worker_of(pool), signal.SIGKILL)
            assert alive_after(before, 60) == []
    assert alive_after(before, 60) == []


def worker_of(pool: RewardPool) -> int:
    (reward,) = score(pool, "pid")
    return int(reward.value)


def run_until_killed(told: Connection) -> None:
    """Run in a separate process."""
    with pool_of() as pool:
        score(pool, "a", *FORKING)
        told.send(worker_of(pool))
        score(pool, "hang")


def test_a_worker_and_what_it_forked_end_with_a_killed_run(descendants):
    context = multiprocessing.get_context("spawn")
    told, tell = context.Pipe(duplex=False)
    run = context.Process(target=run_until_killed, args=(tell,))
    run.start()
    worker = psutil.Process(told.recv())
    assert worker in descendants() and len(descendants()) >= 5
    run.kill()
    run.join(60)
    assert alive_after(but_trackers(descendants()), 60) == []


@pytest.mark.long
def test_a_worker_that_stops_its_keeper_ends_with_the_pool(descendants):
    with pool_of() as pool:
        score(pool, "a", "stop the keeper", "b")
    assert alive_after(descendants(), 60) == []


def test_shared_memory_of_a_worker_is_removed_with_it(monkeypatch, descendants):
    name = f"megatron-rl-test-{os.getpid()}"
    monkeypatch.setenv("SPOILING_NAME", name)
    with pool_of() as pool:
        score(pool, "share memory")
        assert Path("/dev/shm", name).exists()
    assert not Path("/dev/shm", name).exists()
    assert alive_after(descendants(), 60) == []


def test_a_task_that_cannot_be_sent_costs_only_itself():
    problems = [Problem("0", "?", ""), Problem("1", "?", "", columns={"lock": threading.Lock()}), Problem("2", "?", "x" * 2**27)]
    with pool_of() as pool:
        rewards = [reward for [reward] in pool.score(["a"] * 4, [*problems, problems[0]])]
    assert [reward.correct for reward in rewards] == [True, False, False, True]
    assert rewards[1].error == "the task cannot be sent: TypeError: lock cannot be sent to a worker"
    assert rewards[2].error == "the task cannot be sent: FrameError: 128 MiB, and a message has at most 64 MiB"


def test_a_keeper_ends_as_its_program_did_and_passes_on_a_bounded_part_of_its_errors(tmp_path):
    def run(code: str) -> tuple[int | None, str]:
        with open(tmp_path / "errors", "wb") as file:
            command = [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), "", sys.executable, "-I", "-S", "-c", code]
            exit_code = subprocess.run(command, stderr=file, timeout=60, check=False).returncode
        return exit_code, (tmp_path / "errors").read_text()

    assert run("raise SystemExit(7)") == (7, "")
    assert run("import os; os.kill(os.getpid(), 11)") == (-11, "")
    assert run("import os; os.write(2, b'short')") == (0, "short")
    code, errors = run("import os\nfor _ in range(100): os.write(2, b'x' * 2**20)")
    assert code == 0 and errors.startswith("xxx") and errors.endswith("the rest is left out]\n")
    assert len(errors) < 2 * keeper.MOST_ERROR_BYTES
