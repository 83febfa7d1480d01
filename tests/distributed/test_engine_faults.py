"""Engines that die, hang or lose their connection, with one and two trainer ranks: responses and weights are the same as without faults.

The engines are `support.fake_engine`; tests/engine/test_several_engines.py has real ones.
"""

from itertools import product

import pytest
from support import fake_engine
from support.processes import World, alive_after, family

HEALTH, START = 10.0, 900.0
COUNT, TOKENS = 24, 100
ONE_RANK = pytest.param((1, "shared_memory"), marks=pytest.mark.long)


@pytest.fixture(scope="module", params=[(2, "process_group"), ONE_RANK], ids=["two ranks, gloo", "one rank, shared memory"])
def world(request, tmp_path_factory):
    """Trainer ranks with two engines. The tests share them in order; each leaves both proved."""
    ranks, transport = request.param
    folder = tmp_path_factory.mktemp("light")
    with World(ranks, folder / "world") as world:
        world.call(fake_engine.start, folder, 2, {"transport": transport}, HEALTH, seconds=START)
        yield world


def answers(world, engine=None):
    return world.call(fake_engine.answers, COUNT, TOKENS, engine)[0]


def lines(world):
    return "\n".join(world.call(fake_engine.take_messages)[0])


def test_all_engines_answer_alike_and_only_new_weights_change_that(world):
    both, first, second = (answers(world, engine) for engine in (None, 0, 1))
    assert both == first == second and {version for _, version in both} == {1}
    world.call(fake_engine.change, 2)
    reports = world.call(fake_engine.sync_through, 2, {})
    assert {(report["proved"], report["restarts"], report["recovery_seconds"]) for report in reports} == {(reports[0]["tensors"], 0, 0.0)}
    now = answers(world)
    assert {version for _, version in now} == {2} and [tokens for tokens, _ in now] != [tokens for tokens, _ in both]


def test_only_what_changed_is_sent_and_a_wrong_base_is_answered_with_everything(world, request):
    """Within one host, through shared memory, everything is always sent (`sync.delta = "auto"`)."""
    deltas = "gloo" in request.node.callspec.id
    reports = []
    for version, seed, flipped in ((10, 7, None), (11, None, None), (12, None, 1), (13, None, None)):
        world.call(*((fake_engine.change_a_little, 3) if seed is None else (fake_engine.change, seed)))
        if flipped is not None:
            world.call(fake_engine.flip_a_byte, flipped)
        reports.append(world.call(fake_engine.sync_through, version, {})[0])
        assert reports[-1]["proved"] == reports[-1]["tensors"]
        few = [world.call(fake_engine.answers, 2, 3, engine)[0] for engine in (0, 1)]
        assert few[0] == few[1] and few[0][0][1] == version
    other, little, wrong, again = reports
    assert other["bytes"] == wrong["bytes"] and [report["wrong_bases"] for report in reports] == [0, 0, int(deltas), 0]
    told = lines(world)
    base_line = "an engine did not hold the weights of the last proved sync, so all weights are sent: the sync is not proved: "
    if deltas:
        assert little["bytes"] == again["bytes"] < other["bytes"] // 100 and 0 < little["changed_share"] == again["changed_share"] < 0.01
        assert other["changed_share"] > 0.5 and told.count(base_line) == 1 and " of engine rank 1 differs from " in told
        assert told.count("sync.delta = auto: sending what changed; 0.0") == told.count("sync.delta = auto: sending everything; 9") == 1
    else:
        assert {report["bytes"] for report in reports} == {other["bytes"]} and other["changed_share"] is None and "base" not in told


@pytest.mark.parametrize("fault", [pytest.param("hang", marks=pytest.mark.long), "kill"])
def test_an_engine_that_is_lost_in_a_sync_is_replaced_and_the_sync_is_proved(world, fault):
    version = {"hang": 3, "kill": 4}[fault]
    world.call(fake_engine.change, version)  # a sync of the same weights would send nothing
    reports = world.call(fake_engine.sync_through, version, {1: fault}, seconds=START)
    assert {(report["proved"], report["restarts"]) for report in reports} == {(reports[0]["tensors"], 1)}
    messages = lines(world)
    assert "engine 1 is lost" in messages and f"engines serve policy version {version} again, proved" in messages
    assert fault == "kill" or f"it did not respond for {HEALTH:g} s (rollout.health_timeout) and was killed" in messages
    both, first, second = (answers(world, engine) for engine in (None, 0, 1))
    assert both == first == second and {served for _, served in both} == {version}


@pytest.mark.long
def test_what_was_sampled_when_all_engines_are_lost_is_sampled_anew(world):
    """One engine is killed, the other hangs."""
    expected = answers(world)
    results = world.call(fake_engine.answers_through, 4, {0: "kill", 1: "hang"}, COUNT, TOKENS, seconds=START)
    assert results[0] == {"result": expected, "left": []} and all(other == expected for other in results[1:])
    assert f"it did not respond for {HEALTH:g} s (rollout.health_timeout) and was killed" in lines(world)
    assert answers(world, 0) == answers(world, 1) == expected


@pytest.mark.long
def test_the_other_engine_takes_over_from_one_whose_connection_breaks(world):
    expected = answers(world)
    lines(world)
    results = world.call(fake_engine.answers_through, 4, {0: "cut requests"}, COUNT, TOKENS, seconds=START)
    assert results[0]["result"] == expected
    messages = lines(world)
    assert "engine 0 is lost: the engine does not answer /generate" in messages and "still runs" in messages and "engine 1" not in messages
    world.call(fake_engine.change, 5)
    reports = world.call(fake_engine.sync_through, 5, {}, seconds=START)
    assert {report["restarts"] for report in reports} == {3}, "those of the test before count here: no sync of a new version was since"
    assert answers(world, 0) == answers(world, 1)


CALLS = ("release", "resume", "/flush_cache", "/begin_weight_update", "start", "finish", "/end_weight_update", "/update_weight_version")
CALLS += ("reread", "reread digests", "served")
SOME = (("kill", "served"), ("hang", "finish"))
STRIKES = [pytest.param(*strike, marks=() if strike in SOME else pytest.mark.long) for strike in product(("kill", "hang"), CALLS)]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("fault", "call"), STRIKES)
def test_an_engine_that_is_lost_between_two_jobs_is_noticed_at_once(world, fault, call):
    """Every request is watched: a hang is noticed after `rollout.health_timeout`, not after `rollout.request_timeout`."""
    version = 20 + 4 * CALLS.index(call) + 2 * (fault == "hang")
    world.call(fake_engine.sync_through, version - 1, {})  # it counts the losses before it
    world.call(fake_engine.change, version)
    results = world.call(fake_engine.sync_struck, version, call, fault, seconds=START)
    report, struck = results[0]
    assert (report["proved"], report["restarts"], struck) == (report["tensors"], 1, 1)
    told = lines(world)
    assert "engine 1 is lost" in told and (fault == "kill" or f"it did not respond for {HEALTH:g} s (rollout.health_timeout)" in told)
    assert "rollout.request_timeout" not in told
    assert answers(world, 0) == answers(world, 1)


def test_engines_end_with_rank_0_also_those_that_hang(world):
    """This is the last test, because nothing is left after it."""
    trainer, *engines = family(world.pid())
    assert engines
    for process in engines:
        process.suspend()
    trainer.kill()
    assert alive_after(engines, 200) == []
