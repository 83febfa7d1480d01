"""The gate between generation and weight changes, and the health monitor of an engine."""

import threading
import time
from unittest.mock import Mock

import pytest

from megatron_rl.errors import EngineLostError, RunError
from rollout_sglang.engine import AnswersDroppedError, RequestGate
from rollout_sglang.process import HealthMonitor


class Request(threading.Thread):
    """A request that runs in the gate until `release` and records in `order` what became of its answer. A `released` one may wait."""

    def __init__(self, gate: RequestGate, order: list[str], name: str = "request", released: bool = False) -> None:
        super().__init__()
        self.gate, self.order, self.label = gate, order, name
        self.inside, self.release = threading.Event(), threading.Event()
        self.start()
        if released:
            self.release.set()
        else:
            assert self.inside.wait(5)

    def run(self) -> None:
        try:
            with self.gate.passing():
                self.inside.set()
                self.release.wait(10)
        except AnswersDroppedError:
            self.order.append(f"{self.label} dropped")
        else:
            self.order.append(f"{self.label} answered")


def assert_refused(gate: RequestGate, line: str) -> None:
    with pytest.raises(RunError, match=line), gate.passing():
        pass


def test_a_change_waits_for_running_requests_and_new_requests_wait_for_the_change():
    gate, order = RequestGate(10), []
    running = Request(gate, order, "early")
    closing = threading.Thread(target=lambda: (gate.drain(), order.append("closed")))
    closing.start()
    time.sleep(0.1)
    waiting = Request(gate, order, "late", released=True)
    time.sleep(0.2)
    assert order == []
    running.release.set()
    closing.join(5)
    time.sleep(0.1)
    assert sorted(order) == ["closed", "early answered"]
    gate.open()
    waiting.join(5)
    assert order[2:] == ["late answered"]
    gate, calls = RequestGate(10), []
    running = Request(gate, [])
    gate.drain(lambda: (calls.append(1), len(calls) == 3 and running.release.set()))
    assert len(calls) >= 3


def test_no_wait_is_endless_and_a_failing_request_leaves():
    gate = RequestGate(0.2)
    running = Request(gate, [])
    with pytest.raises(RunError, match="requests were still running after 0.2 s"):
        gate.drain()
    with pytest.raises(KeyError), gate.passing():  # the gate is open again
        raise KeyError
    gate.hold(closed=True)  # a gate may be closed while requests are inside
    assert_refused(gate, "weights were being changed")
    gate.open()
    running.release.set()
    running.join(5)
    gate.drain()
    assert_refused(gate, "the engine's weights were being changed for 0.2 s")


def test_an_engine_without_weights_refuses_immediately_even_if_its_gate_is_opened():
    gate = RequestGate(10, "no weights yet")
    gate.drain()
    gate.open()
    assert_refused(gate, "^no weights yet$")
    gate.refusal = ""
    with gate.passing():
        pass


def test_an_answer_during_a_change_is_held_until_it_is_proved():
    gate, order = RequestGate(10), []
    running = Request(gate, order)
    gate.hold(closed=True)
    running.release.set()
    running.join(0.2)
    assert order == []
    order.append("proved")
    gate.open()
    running.join(5)
    assert order == ["proved", "request answered"]


def test_answers_of_unproved_weights_are_dropped_by_the_next_change():
    gate, order = RequestGate(10), []
    gate.hold(closed=False)
    early = Request(gate, order, "early", released=True)
    early.join(0.2)
    assert early.inside.is_set() and order == [] and gate.holding
    gate.drain()
    early.join(5)
    assert order == ["early dropped"]
    gate.hold(closed=False)
    late = Request(gate, order, "late", released=True)
    late.join(0.2)
    gate.open()
    late.join(5)
    assert late.inside.is_set() and order[1:] == ["late answered"]


def test_a_silent_engine_is_given_up_once():
    given_up, ask = threading.Event(), Mock(side_effect=EngineLostError("silent"))
    watch = HealthMonitor(ask, given_up.set, 0.01)
    with watch.working(), watch.working():
        assert given_up.wait(10)
    ask.assert_called_once_with()


def test_an_engine_is_asked_only_while_it_works():
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
