"""The gate between generation and weight changes."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_rl.errors import RunError
from rollout_sglang.request_gate import AnswersDroppedError, RequestGate


class Request(threading.Thread):
    """A request that runs in the gate until `release`, and records what became of its answer in `order`."""

    def __init__(self, gate: RequestGate, order: list[str], name: str = "request", released: bool = False) -> None:
        super().__init__()
        self.gate, self.order, self.label = gate, order, name
        self.inside, self.release = threading.Event(), threading.Event()
        if released:
            self.release.set()
        self.start()

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
    assert running.inside.wait(5)
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


def test_on_wait_is_called_until_no_request_is_inside():
    gate, calls = RequestGate(10), []
    running = Request(gate, [])
    assert running.inside.wait(5)
    gate.drain(lambda: (calls.append(1), len(calls) == 3 and running.release.set()))
    assert len(calls) >= 3


def test_no_wait_is_endless_and_a_failing_request_leaves():
    gate = RequestGate(0.2)
    running = Request(gate, [])
    assert running.inside.wait(5)
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
    assert running.inside.wait(5)
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
