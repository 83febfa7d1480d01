"""The health monitor pings a working engine, and gives up on an engine that does not answer."""

from __future__ import annotations

import threading

from megatron_rl.errors import EngineLostError, RunError
from rollout_sglang.health_watch import HealthMonitor


def test_a_silent_engine_is_given_up_once():
    given_up, asked = threading.Event(), []

    def ask() -> None:
        asked.append(1)
        raise EngineLostError("silent")

    watch = HealthMonitor(ask, given_up.set, 0.01)
    with watch.working(), watch.working():
        assert given_up.wait(10)
    assert len(asked) == 1


def test_an_engine_is_asked_only_while_it_works_and_does_not_rest():
    asked = threading.Semaphore(0)
    watch = HealthMonitor(lambda: asked.release(), lambda: None, 0.01)

    def is_left_alone() -> bool:
        while asked.acquire(timeout=0.2):
            pass
        return not asked.acquire(timeout=0.1)

    for _ in range(2):
        with watch.working():
            assert asked.acquire(timeout=10) and asked.acquire(timeout=10)
    assert is_left_alone()
    watch.suspend()  # it rests, though somebody waits
    with watch.working():
        assert is_left_alone()
        watch.resume()
        assert asked.acquire(timeout=10)
        watch.suspend()
        assert is_left_alone()
        watch.resume()
        watch.resume()
        assert asked.acquire(timeout=10)


def test_a_question_that_fails_after_the_work_is_done_is_no_loss():
    asking, done, given_up = threading.Event(), threading.Event(), []

    def ask() -> None:
        asking.set()
        done.wait(10)
        raise RunError("closed")

    watch = HealthMonitor(ask, lambda: given_up.append(1), 0.01)
    with watch.working():
        assert asking.wait(10)
    done.set()
    for thread in threading.enumerate():
        if thread.name == "megatron-rl-watch":
            thread.join(10)
    assert given_up == []
