"""A high-precision trainer with an INT8 engine with experts, as the contract says. For FP8 see test_routing_replay.py."""

import threading

import pytest
import torch
from support import trainer_engine
from support.models import make_checkpoint, random_sequences
from support.processes import alive_after, command_lines, family

from megatron_rl.errors import RunError

pytestmark = pytest.mark.long
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
TENSORS = 3 + 4 + 1 + 4 * 2  # embedding, last norm, lm_head; four norms; a router; four quantized weights with their scales
PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(8, seed=21)]


@pytest.fixture(scope="module")
def world(new_world, tmp_path_factory):
    """A trainer and its engine. The tests share them in order; each leaves them proved."""
    world, checkpoint = new_world(), make_checkpoint(tmp_path_factory.mktemp("experts"), **EXPERTS)
    world.call(trainer_engine.start, checkpoint, tmp_path_factory.mktemp("engine"), {"mode": "int8_rollout", "high": "fp32"})
    return world


def assert_the_engine_computes_as_emulated(world):
    logprobs = world.call(trainer_engine.generate_and_emulate, PROMPTS)[0]
    assert len(logprobs["engine"]) >= 50
    assert torch.equal(logprobs["engine"], logprobs["emulated"])  # the same operators; the bits of none depend on what else is computed
    # what quantizing itself does, which FlashRL's importance ratios have to make good
    assert (logprobs["engine"] - logprobs["trainer"]).abs().mean() > 1e-3


def test_the_engine_that_was_just_started_passes_all_checks_and_computes_as_emulated(world):
    world.call(trainer_engine.check_live)
    assert world.call(trainer_engine.prove) == [TENSORS]
    _, _, rollout = world.call(trainer_engine.compare_graphs)[0]
    quantized = [str(edge.format) for edge in rollout.edges if edge.format.granularity]
    assert len(quantized) == 8  # weights and inputs of qkv, output, gate_up, down
    assert set(quantized) == {"int8 channel fp32", "int8 token fp32"}
    assert_the_engine_computes_as_emulated(world)


def test_after_an_optimizer_step_a_sync_serves_the_newly_quantized_weights(world):
    world.call(trainer_engine.train, random_sequences(8, seed=22))
    with pytest.raises(RunError, match="the sync is not proved"):
        world.call(trainer_engine.prove)
    for version in (1, 2):  # twice: SGLang processes its weights at the end of every update
        report = world.call(trainer_engine.sync, version, 1 << 16)[0]
        assert report["proved"] == report["tensors"] == TENSORS and report["chunks"] > 5
    world.call(trainer_engine.check_live)
    assert_the_engine_computes_as_emulated(world)


def test_one_bit_changed_in_the_engine_is_named_and_the_next_sync_mends_it(world):
    for element, line in {
        ("self_attn.o_proj.weight", 130, 255): r"o_proj\.weight of engine rank 0 .*rows 130\.\.130, columns 0\.\.255 \(int8\)",
        ("mlp.experts.w13_weight_scale", 519, 0): r"experts\.w13_weight_scale of .*rows 519\.\.519, columns 0\.\.0 \(scale\)",  # expert 2
    }.items():
        world.call(trainer_engine.change_engine, f"model.layers.0.{element[0]}", *element[1:])
        with pytest.raises(RunError, match=line):
            world.call(trainer_engine.prove)
        assert world.call(trainer_engine.sync, 3, 16 << 20)[0]["proved"] == TENSORS


def test_an_engine_killed_while_it_generates_is_an_error_at_once(world):
    """This is the last test, because the engine is gone after it."""
    engine = family(world.pid())[1:]
    threading.Timer(2.0, engine[0].kill).start()
    line, tail = world.call(trainer_engine.generate_until_it_fails, PROMPTS)[0]
    assert "the engine does not answer /generate" in line and "engine.log" in line and "\n" not in line
    assert isinstance(tail, str)
    for _ in range(2):
        world.call(trainer_engine.ask, "engines.stop")
    assert command_lines(alive_after(engine, 60)) == {}
