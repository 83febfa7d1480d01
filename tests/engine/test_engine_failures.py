"""Engines that break the contract, do not start, or die: one RunError with the log's tail, in bounded time, and nothing left running."""

from __future__ import annotations

import shutil
import socket
import threading
import time

import pytest
from support.models import FP8, edit_config, random_sequences
from support.processes import alive_after, command_lines, end, family, until

from megatron_rl.errors import RunError

pytestmark = pytest.mark.slow

PROMPTS = [sequence.prompt_ids for sequence in random_sequences(4, seed=1)]


@pytest.fixture(scope="module")
def other_scales(new_world, checkpoint, tmp_path_factory):
    """A trainer of pow2 scales with an engine whose checkpoint has no "scale_fmt": same bytes, activations in fp32 scales."""
    folder, world = tmp_path_factory.mktemp("other_scales"), new_world()
    model = world.call("support.trainer_engine:save_only", checkpoint, folder / "model", FP8)[0]
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    edit_config(model, {"quantization_config": {**quantization, "modules_to_not_convert": ["lm_head"]}})
    world.call("support.trainer_engine:start", checkpoint, folder, FP8, model, seconds=270)
    return world


def test_an_engine_with_other_activation_scales_is_refused(other_scales):
    other_scales.call("support.trainer_engine:prove")  # the weights alone do not show it
    line = r"breaks the precision contract: .*_proj quantises activations with fp32 scales; precision.scale_format is pow2"
    with pytest.raises(RunError, match=line):
        other_scales.call("support.trainer_engine:check_live")
    found = other_scales.call("support.trainer_engine:generate", PROMPTS)[0]
    assert (found["engine"] - found["trainer"]).abs().mean() > 1e-4  # it is another policy


def test_its_live_graph_says_where_it_differs(other_scales):
    lines, *_ = other_scales.call("support.trainer_engine:compare_served_graphs")[0]
    readers = ["input_norm -> attention.qkv", "attention.core -> attention.output", "post_attention_norm -> mlp.gate_up"]
    readers += ["mlp.swiglu -> mlp.down"]
    assert lines == [f"layer 0: {name} (x) is e4m3 1x128 fp32 in the rollout, e4m3 1x128 pow2 in training" for name in readers]


def test_an_engine_killed_while_it_generates_is_an_error_at_once(other_scales):
    below = family(other_scales.pid())[1:]
    server = below[0]
    killer = threading.Timer(2.0, server.kill)
    killer.start()
    start = time.monotonic()
    line, tail = other_scales.call("support.trainer_engine:generate_until_it_fails", PROMPTS, seconds=60)[0]
    assert time.monotonic() - start < 30
    assert "the engine does not answer /generate" in line and "engine.log" in line and "\n" not in line
    assert isinstance(tail, str)
    other_scales.call("support.trainer_engine:stop_twice", seconds=45)
    assert command_lines(alive_after(below, 5)) == {}


def test_engines_that_cannot_start(new_world, checkpoint, tmp_path):
    """All at once, as each costs SGLang's import: weights that are none, an unknown argument, a port that somebody else answers on
    with silence, so that only the time-out ends it."""
    no_model = tmp_path / "no_model"
    shutil.copytree(checkpoint, no_model)
    (no_model / "model.safetensors").write_bytes(b"no tensors")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        faults = {
            "model": (no_model, {}, "did not start", "safetensors"),
            "port": (checkpoint, {"port": taken.getsockname()[1], "start_timeout": 15.0}, "was not healthy after 15 s", ""),
            "argument": (checkpoint, {"argument": "--no-such-thing"}, "did not start", "unrecognized arguments: --no-such-thing"),
        }
        worlds = {name: new_world() for name in faults}
        for name, (model, fault, _, _) in faults.items():
            (tmp_path / f"log_{name}").mkdir()
            worlds[name].send("support.engine_faults:launch_only", model, tmp_path / f"log_{name}", fault)
        for name, (_, _, line, log) in faults.items():
            said, tail, seconds = worlds[name].receive(seconds=270)[0]
            assert line in said and f"log_{name}" in said, f"{name}: {said}"
            assert log.lower() in tail.lower(), f"{name}: {tail}"
            assert seconds < 180, f"{name}: {seconds}"  # before the time-out of 240 s that a healthy engine would have
            until(lambda name=name: len(family(worlds[name].pid())) == 1, 30, f"{name}: the engine's processes end")
    for world in worlds.values():
        end(world.family())
