"""A real engine whose ranks are on two nodes has the bits of an engine on one node, and is lost with either node. The nodes are two
addresses of this machine, or this machine and a network namespace, which share neither an address nor memory."""

import os
import subprocess

import pytest
from support import trainer_engine
from support.models import FP8, TENSORS, random_sequences
from support.processes import alive_after, family
from support.trainer_engine import TWO_NODES

from megatron_rl.rollout.engine_placement import LAUNCHER_VARIABLE

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]
PROMPTS = [sample.prompt_ids for sample in random_sequences(8, seed=51)]
HEALTH = 30.0
GROUP = {"transport": "process_group"}


def set_launchers(*lines):
    """Set how the next `start` launches engines on their nodes."""
    os.environ[LAUNCHER_VARIABLE] = "\n".join(lines)


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


OWN, OTHER = "10.213.77.1", "10.213.77.2"


@pytest.fixture(scope="module")
def namespace():
    """The launcher of a network namespace with the address OTHER, which reaches this machine as OWN."""
    name = f"mrl{os.getpid()}"
    own, other = f"{name}a", f"{name}b"

    def ip(*words):
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        ip("netns", "add", name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces: {error}")
    try:
        ip("link", "add", own, "type", "veth", "peer", "name", other, "netns", name)
        ip("addr", "add", f"{OWN}/24", "dev", own)
        ip("link", "set", own, "up")
        for words in (("addr", "add", f"{OTHER}/24", "dev", other), ("link", "set", other, "up"), ("link", "set", "lo", "up")):
            ip("-n", name, *words)
        yield f"ip netns exec {name} unshare --mount sh -c 'mount -t tmpfs tmpfs /dev/shm; exec \"$@\"' sh"
    finally:
        ip("netns", "del", name)


@pytest.mark.parametrize("hosts", [("127.0.0.1", OTHER), (OTHER, "127.0.0.1")], ids=["server here", "server there"])
def test_nodes_that_share_nothing_meet_and_are_filled(hosts, namespace, new_world, checkpoint, tmp_path):
    world = new_world()
    world.call(set_launchers, *(namespace if host == OTHER else "" for host in hosts))
    sections = {"rollout": {**TWO_NODES, "hosts": hosts}, "sync": {**GROUP, "host": OWN}}
    world.call(trainer_engine.start, checkpoint, tmp_path, FP8, sections)
    world.call(trainer_engine.check_live)
    world.call(trainer_engine.train, random_sequences(8, seed=51))
    report = world.call(trainer_engine.sync, 1, 64 << 10)[0]
    assert report["proved"] == report["tensors"] == 2 * TENSORS
    assert len(generate(world)) == len(PROMPTS)
    world.close()
