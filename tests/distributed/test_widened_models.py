"""What `export --align` writes computes what the narrow checkpoint computes, in every family, and its zeros stay zero in training."""

import pytest
import torch
from support import trainer, transformers_reference
from support.families import ARCHITECTURES, CLASSES
from support.models import FP8, FP32, make_model, random_sequences, read_weights

from megatron_rl.errors import UserError
from megatron_rl.hf.align import Alignment, widen
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.checkpoint.export import convert
from parallel.digest import view_rect
from parallel.model_geometry import ModelGeometry

NARROW = {"hidden_size": 192, "intermediate_size": 200, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3}
EVEN = next(seed for seed in range(99) if max(sequence.length for sequence in random_sequences(4, seed)) % 2)
"""Sequence parallelism, which experts need, cuts the batch's width: it is even with this seed."""


PLAIN = [name for name in CLASSES if all(kind.can_widen for kind in ModelGeometry.from_hf_config(ARCHITECTURES[name]).attention)]


@pytest.fixture(scope="module", params=[*PLAIN, "deepseek_direct_q"])
def pair(request, tmp_path_factory):
    """A narrow checkpoint, and the wide one for two ranks."""
    folder, config = tmp_path_factory.mktemp(request.param), ARCHITECTURES[request.param]
    widths = NARROW | ({"moe_intermediate_size": 72} if "moe_intermediate_size" in config else {})
    widths |= {"num_key_value_heads": 6, "q_lora_rank": config["q_lora_rank"] and 96} if "kv_lora_rank" in config else {}
    narrow = make_model(folder / "narrow", config | widths)
    convert(narrow, folder / "wide", FP32, Alignment(128, tp=2))
    return narrow, folder / "wide"


def test_the_function_is_the_same(pair, worlds, transformers_process):
    """The results of transformers and of the trainer are equal up to the order of sums in FP32."""
    ids = torch.randint(0, 384, (3, 40), generator=torch.Generator().manual_seed(5)).tolist()
    expected, wide = (transformers_process.call(transformers_reference.logits, folder, ids)[0].log_softmax(-1) for folder in pair)
    assert expected.std() > 0.1
    trained = torch.cat(worlds(1).call(trainer.logits, pair[1], FP32, ids), dim=-1).log_softmax(-1)
    for logprobs in (wide, trained):
        assert (logprobs - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.default_cases(2)
def test_what_was_added_stays_zero_in_training(pair, worlds):
    """Two ranks train in unified FP8, for which the narrow model has no whole blocks."""
    narrow, wide = (ModelGeometry.from_hf_config(read_config(folder)) for folder in pair)
    batches = [random_sequences(4, EVEN), random_sequences(4, EVEN)]
    trained = worlds(2).call(trainer.train_grpo, pair[1], FP8, {"learning_rate": 1e-3}, batches)[0]["masters"]
    start = read_weights(pair[1])
    for tensor, old in widen(lambda region: view_rect(torch.ones_like(start[region.tensor.name]), region.tensor_rect), narrow, wide):
        added = old == 0
        assert not trained[tensor.name][added].any(), tensor.name
        if tensor.role not in ("router_bias", "mlp_in", "mlp_out"):  # an expert may get no token
            assert not torch.equal(trained[tensor.name], start[tensor.name]), tensor.name


def test_a_runs_checkpoint_is_widened_as_its_plain_export_is(worlds, tmp_path):
    narrow = make_model(tmp_path / "narrow", ARCHITECTURES["qwen3"] | NARROW)
    worlds(1).call(trainer.save_checkpoint, narrow, FP32, random_sequences(4, seed=1), tmp_path / "step_00001")
    for name, alignment in (("plain", None), ("wide", Alignment(128, tp=2))):
        worlds(1).call(trainer.export, tmp_path / "step_00001", tmp_path / name, "bf16", alignment)
    convert(tmp_path / "plain", tmp_path / "widened", {"mode": "bf16"}, Alignment(128, tp=2))
    expected, result = read_weights(tmp_path / "widened"), read_weights(tmp_path / "wide")
    assert result.keys() == expected.keys() and all(torch.equal(result[name], expected[name]) for name in expected)
    assert read_config(tmp_path / "wide") == read_config(tmp_path / "widened")
    with pytest.raises(UserError, match="--align = 128: cannot widen quantized blocks of a run; use --precision bf16"):
        worlds(1).call(trainer.export, tmp_path / "step_00001", tmp_path / "fp8", "fp8", Alignment(128))
