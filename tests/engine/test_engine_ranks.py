"""A real SGLang, filled by a trainer in another layout, has its log-probs bit for bit, and closely those of transformers' model."""

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
import torch
from support import trainer_engine
from support.models import FP8, masters, random_sequences, served
from support.processes import World
from support.trainer_engine import TWO_NODES, current
from support.transformers_reference import load, response_logprobs

from megatron_rl.config import PrecisionConfig
from megatron_rl.errors import RunError
from megatron_rl.hf.files import read_config
from megatron_rl.hf.write import write_checkpoint
from megatron_rl.kernels.linear.reference import fprop
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight
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

    return current().rank0_engines.run(read, dict[str, Any])


def compute_logprobs(hf_config, seed, precision, sequences):
    """Return the log-probs of all responses' tokens for `masters` with the contract's precision flow. `sequences` are (prompt, response)
    pairs.

    The model is transformers', in float32, with dequantized blocks as weights. Only `F.linear` quantizes its input if its weight is one of
    those. kv_b_proj is left out, because an engine with absorbed MLA multiplies its blocks with inputs that are not quantized.
    """
    contract = PrecisionContract.from_config(PrecisionConfig.model_validate(precision))
    values = served(hf_config, masters(hf_config, seed), contract)
    for name in [name for name in values if f"{name}_scale_inv" in values]:
        values[name] = dequantize_weight(QuantizedWeight(values[name], values.pop(f"{name}_scale_inv")))
    with tempfile.TemporaryDirectory() as folder:
        config = {key: value for key, value in hf_config.items() if key != "quantization_config"} | {"torch_dtype": "float32"}
        write_checkpoint(Path(folder), config, {name: tensor.float() for name, tensor in values.items()}, None)
        model = load(Path(folder))
    weights = [weight for name, weight in model.named_parameters() if "_proj" in name and "kv_b_proj" not in name and weight.dim() > 1]
    quantized = {matrix.data_ptr() for weight in weights for matrix in (weight if weight.dim() == 3 else [weight])}  # 3: of all experts
    linear = torch.nn.functional.linear

    def flow(x, weight, bias=None):
        if weight.data_ptr() not in quantized:
            return linear(x, weight, bias)
        y = fprop(x, weight, contract.scale_format)
        return y if bias is None else y + bias

    with mock.patch.object(torch.nn.functional, "linear", flow):
        return response_logprobs(model, sequences)


@pytest.fixture(scope="module")
def transformers_side(tmp_path_factory):
    with World(1, tmp_path_factory.mktemp("transformers")) as world:
        yield world


def assert_same_logprobs(world, folder, transformers_side, seed):
    """Compare log-probs of the weights of `seed`, which are served as the version of that number."""
    generated = world.call(trainer_engine.generate, PROMPTS)[0]
    assert generated["versions"] == {seed}
    config = read_config(folder / "model")
    reference = transformers_side.call(compute_logprobs, config, seed, FP8, generated["samples"])[0]
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
