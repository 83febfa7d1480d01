"""A real SGLang, filled by a trainer in another layout, has its log-probs bit for bit, and closely those of transformers' model."""

import httpx
import pytest
import torch
from support import trainer_engine, transformers_reference
from support.models import FP8, random_sequences
from support.processes import World
from support.trainer_engine import TWO_NODES, current

from megatron_rl.errors import RunError
from megatron_rl.hf.files import read_config
from parallel.layout import Layout

PROMPTS = [sample.prompt_ids.tolist() for sample in random_sequences(6, seed=31)]
SGLANG = {"schedule_policy": "lpm", "max_prefill_tokens": 64, "schedule_conservativeness": 0.5}
LEAST = 3 + 2 + 4 * 2  # embedding, last norm, lm_head; a layer's norms, and its FP8 weights with their scales


def read_server_arguments(names):
    """Return the first engine's server arguments of these names, as SGLang reports them."""

    def read(engines):
        server = engines.replicas[0].engine.server
        answer = httpx.get(f"{server.url}/server_info", headers={"Authorization": f"Bearer {server.api_key}"}, timeout=60).json()
        return {name: answer[name] for name in names}

    return current().rank0_engines.run(read)


@pytest.fixture(scope="module")
def transformers_side(tmp_path_factory):
    with World(1, tmp_path_factory.mktemp("transformers")) as world:
        yield world


def assert_same_logprobs(world, folder, transformers_side, seed):
    """Compare log-probs of the weights of `seed`, which are served as the version of that number."""
    generated = world.call(trainer_engine.generate, PROMPTS)[0]
    assert generated["versions"] == {seed}
    config = read_config(folder / "model")
    reference = transformers_side.call(transformers_reference.fp8_logprobs, config, seed, FP8, generated["samples"])[0]
    assert len(generated["engine"]) >= 50
    # most of transformers' are equal up to the order of sums, which no other quantizer or weight would give; an E4M3 rounding that tips
    # over (2^-3 of one activation) stays in the cache for all tokens that follow, and shifts them by some 10^-2
    difference = (generated["engine"] - reference).abs()
    assert difference.median() < 1e-5
    assert difference.mean() < 2e-2  # another quantizer: 3e-2 and more in the median
    assert torch.equal(generated["engine"], generated["trainer"])


@pytest.mark.parametrize(
    "kind, layout, rollout, transport, empty",
    [
        pytest.param("qwen3_moe", Layout(ep=2, dp=2), {**TWO_NODES, "ep": 2}, "process_group", True, marks=pytest.mark.long),
        pytest.param("deepseek_v3", Layout(), {}, "shared_memory", True, marks=pytest.mark.long),  # by default: test_served.py
        ("llama", Layout(cp=2), {"sglang": SGLANG}, "shared_memory", False),
        pytest.param("qwen3", Layout(pp=2, vpp=2), {"tp": 2}, "shared_memory", False, marks=pytest.mark.long),
        pytest.param("qwen3", Layout(pp=2, first_stage_layers=3), {"tp": 2}, "shared_memory", True, marks=pytest.mark.long),
        pytest.param("deepseek_v3", Layout(tp=2, ep=2, etp=1), {"tp": 2}, "shared_memory", False, marks=pytest.mark.long),
    ],
)
def test_an_engine_that_is_empty_or_has_loaded_is_filled_by_a_sync(kind, layout, rollout, transport, empty, transformers_side, tmp_path):
    with World(layout.world_size, tmp_path / "world") as world:
        world.call(trainer_engine.start_architecture, kind, tmp_path, FP8, layout, rollout, empty)
        world.call(trainer_engine.check_live)
        asked = rollout.get("sglang", {})
        assert world.call(read_server_arguments, list(asked))[0] == asked
        if empty:
            with pytest.raises(RunError, match="the engine has no weights yet: it serves nothing before the first proved sync"):
                world.call(trainer_engine.generate, PROMPTS)
        else:
            assert world.call(trainer_engine.prove)[0] >= LEAST
        world.call(trainer_engine.change_weights, kind, 1)
        with pytest.raises(RunError, match="the sync is not proved"):
            world.call(trainer_engine.prove)
        report = world.call(trainer_engine.sync, 1, 1 << 20, {"transport": transport})[0]
        assert report["proved"] == report["tensors"] >= LEAST
        assert world.call(trainer_engine.prove)[0] == report["proved"]
        # for MLA this holds too that w_kc and w_vc are made anew from the kv_b_proj that was written
        assert_same_logprobs(world, tmp_path, transformers_side, 1)
        world.call(trainer_engine.change_weights, kind, 2)
        assert world.call(trainer_engine.sync, 2, 1 << 20, {"transport": transport, "staged": True})[0]["proved"] == report["proved"]
