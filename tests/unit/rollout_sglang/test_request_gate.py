"""The gate between generation and weight changes."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_rl.errors import RunError
from rollout_sglang.request_gate import AnswersDroppedError, RequestGate


def hold(gate: RequestGate, release: threading.Event) -> threading.Thread:
    """A request that runs until `release`."""
    inside = threading.Event()

    def request() -> None:
        with gate.passing():
            inside.set()
            release.wait(10)

    thread = threading.Thread(target=request)
    thread.start()
    assert inside.wait(5)
    return thread


def test_a_change_waits_for_what_runs_and_new_requests_wait_for_the_change():
    gate, release, order = RequestGate(10), threading.Event(), []
    running = hold(gate, release)
    shutting = threading.Thread(target=lambda: (gate.drain(), order.append("shut")))
    shutting.start()
    time.sleep(0.1)

    def late() -> None:
        with gate.passing():
            order.append("late")

    waiting = threading.Thread(target=late)
    waiting.start()
    time.sleep(0.2)
    assert order == []
    release.set()
    shutting.join(5)
    time.sleep(0.1)
    assert order == ["shut"]
    gate.open()
    waiting.join(5)
    running.join(5)
    assert order == ["shut", "late"]


def test_who_runs_is_hurried_until_he_is_gone():
    gate, release, hurried = RequestGate(10), threading.Event(), []

    def on_wait() -> None:
        hurried.append(1)
        if len(hurried) == 3:
            release.set()

    running = hold(gate, release)
    gate.drain(on_wait)
    running.join(5)
    assert len(hurried) >= 3


def test_no_wait_is_endless_and_a_request_that_fails_leaves():
    gate, release = RequestGate(0.2), threading.Event()
    running = hold(gate, release)
    with pytest.raises(RunError, match="requests were still running after 0.2 s"):
        gate.drain()
    with pytest.raises(KeyError), gate.passing():  # it opened again
        raise KeyError
    gate.hold(closed=True)  # a gate may be shut behind those who are inside
    with pytest.raises(RunError, match="weights were being changed"), gate.passing():
        pass
    gate.open()
    with gate.passing():
        release.set()
    running.join(5)
    gate.drain()
    with pytest.raises(RunError, match="the engine's weights were being changed for 0.2 s"), gate.passing():
        pass


def test_an_engine_without_weights_refuses_at_once_whoever_opens_its_gate():
    gate = RequestGate(10, "no weights yet")
    gate.drain()
    gate.open()
    with pytest.raises(RunError, match="^no weights yet$"), gate.passing():
        pass
    gate.refusal = ""
    with gate.passing():
        pass


def test_an_answer_that_arrives_during_a_change_is_held_until_it_is_proved():
    gate, release, order = RequestGate(10), threading.Event(), []
    inside = threading.Event()

    def request() -> None:
        with gate.passing():
            inside.set()
            release.wait(10)
        order.append("answered")

    running = threading.Thread(target=request)
    running.start()
    assert inside.wait(5)
    gate.hold(closed=True)
    release.set()
    running.join(0.2)
    assert order == []
    order.append("proved")
    gate.open()
    running.join(5)
    assert order == ["proved", "answered"]


def test_what_weights_without_a_proof_answered_is_dropped_by_the_next_change():
    gate, order = RequestGate(10), []

    def request(name: str) -> None:
        try:
            with gate.passing():
                order.append(f"{name} computed")
        except AnswersDroppedError:
            order.append(f"{name} dropped")
        else:
            order.append(f"{name} answered")

    gate.hold(closed=False)
    early = threading.Thread(target=request, args=["early"])
    early.start()
    early.join(0.2)
    assert order == ["early computed"] and gate.holding
    gate.drain()
    early.join(5)
    assert order == ["early computed", "early dropped"]
    gate.hold(closed=False)
    late = threading.Thread(target=request, args=["late"])
    late.start()
    late.join(0.2)
    gate.open()
    late.join(5)
    assert order[2:] == ["late computed", "late answered"]
