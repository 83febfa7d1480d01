"""A real engine whose ranks are on two nodes has the bits of an engine on one node, and is lost with either node. The nodes are two
addresses of this machine; test_nodes.py has nodes that share neither an address nor memory."""

import pytest
from support import trainer_engine
from support.models import FP8, TENSORS, random_sequences
from support.processes import alive_after, family
from support.trainer_engine import TWO_NODES

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]
PROMPTS = [sample.prompt_ids for sample in random_sequences(8, seed=51)]
HEALTH = 30.0
GROUP = {"transport": "process_group"}


@pytest.fixture(scope="module")
def world(new_world, checkpoint, tmp_path_factory):
    """A trainer and an engine on two nodes. The tests of this module share them in order; each leaves them proved."""
    world = new_world()
    rollout = {**TWO_NODES, "health_timeout": HEALTH}
    world.call(trainer_engine.start, checkpoint, tmp_path_factory.mktemp("nodes"), FP8, {"rollout": rollout})
    world.call(trainer_engine.check_live)
    return world


@pytest.fixture(scope="module")
def on_one_node(new_world, checkpoint, tmp_path_factory):
    world = new_world()
    world.call(trainer_engine.start, checkpoint, tmp_path_factory.mktemp("one_node"), FP8, {"rollout": {"tp": 2}})
    return world


def generate(world, tokens=24):
    return world.call(trainer_engine.generate_seeded, PROMPTS, tokens)[0]


def test_two_nodes_give_the_bits_of_one_before_and_after_syncs(world, on_one_node):
    assert generate(world) == generate(on_one_node)
    for version, settings in enumerate(({}, {"transport": "gloo", "staged": True, "proof": "streamed"}), 1):
        for each in (world, on_one_node):
            each.call(trainer_engine.train, random_sequences(8, seed=50 + version))
            report = each.call(trainer_engine.sync, version, 64 << 10, {**GROUP, **settings})[0]
            assert report["proved"] == report["tensors"] == 2 * TENSORS
        completions = generate(world)
        assert completions == generate(on_one_node) and {served for *_, served in completions} == {version}


def test_an_engine_that_loses_a_node_is_replaced_on_all_its_nodes(world, on_one_node):
    """One node is killed in a sync, then one hangs while the engine samples."""
    for each in (world, on_one_node):
        each.call(trainer_engine.train, random_sequences(8, seed=53))
    report = world.call(trainer_engine.sync_with_faults, {0: "kill last node"}, 3, GROUP)[0]
    assert (report["proved"], report["tensors"], report["restarts"]) == (2 * TENSORS, 2 * TENSORS, 1)
    on_one_node.call(trainer_engine.sync, 3)
    expected = generate(on_one_node, 100)
    assert generate(world, 100) == expected
    results = world.call(trainer_engine.generate_with_faults, {0: "hang last node"}, 3, PROMPTS, 100)[0]
    assert results == {"result": expected, "left": []}
    lines = [line for line in world.call(trainer_engine.take_messages)[0] if line.startswith("engine 0 is lost: ")]
    assert len(lines) == 2 and "exit code -9 on node 1" in lines[0] and f"did not respond for {HEALTH:g} s" in lines[1], lines


def test_all_nodes_end_with_the_trainer(world):
    trainer, *engine = family(world.pid())
    trainer.kill()
    assert len(engine) >= 4 and alive_after(engine, 120) == []
