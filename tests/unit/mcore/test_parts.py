"""Small parts of the trainer: padding of rows, the learning rate, refused shards, and SwiGLU in checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig

from megatron_rl.config import TrainConfig
from megatron_rl.mcore.actor import count_row_multiple
from megatron_rl.mcore.layers.spec import SwiGLU
from megatron_rl.mcore.optim.optimizer import LearningRateSchedule
from megatron_rl.mcore.weights.load_weights import _load
from parallel.formats import BF16, FP8
from parallel.shards import HFTensor, stack_regions, take_all

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("tp, tokens, device, format, multiple", [
    (4, 12288, CUDA, FP8, 512),
    (4, 12287, CUDA, FP8, 64),
    (2, 6144, CUDA, FP8, 256),
    (8, 8192, CUDA, FP8, 128),
    (4, 1535, CUDA, FP8, 4),
    (2, 8192, CPU, FP8, 2),
    (2, 8192, CUDA, BF16, 2),
    (1, 8192, CUDA, FP8, 1),
])  # fmt: skip
def test_rows_are_padded_if_it_pays(tp, tokens, device, format, multiple):
    config = SimpleNamespace(sequence_parallel=tp > 1, tensor_model_parallel_size=tp, linear_format=format)
    assert count_row_multiple(config, tokens, device) == multiple


@pytest.mark.parametrize("fields, rates", [
    ({}, [8, 8, 8, 8, 8, 8]),
    ({"warmup_steps": 4}, [2, 4, 6, 8, 8, 8]),
    ({"decay_style": "linear", "decay_steps": 4}, [8, 6, 4, 2, 0, 0]),
    ({"decay_style": "linear", "decay_steps": 4, "min_learning_rate": 4}, [8, 7, 6, 5, 4, 4]),
    ({"decay_style": "linear", "warmup_steps": 2}, [4, 8, 8, 6, 4, 2]),
    ({"decay_style": "cosine", "decay_steps": 4}, [8, 4 + 8**0.5, 4, 4 - 8**0.5, 0, 0]),
    ({"decay_style": "WSD", "wsd_decay_steps": 2}, [8, 8, 8, 8, 8, 4]),
])  # fmt: skip
def test_the_learning_rate_warms_up_and_falls(fields, rates):
    optimizer = SimpleNamespace(param_groups=[])
    schedule = LearningRateSchedule(optimizer, TrainConfig(learning_rate=8.0, **fields).decay_over(6))
    assert [schedule(done) for done in range(6)] == pytest.approx(rates)
    assert schedule(3) == pytest.approx(rates[3]), "it has no state"


@pytest.mark.parametrize("name, shape", [("a", r"\(2, 2\) in"), ("b", "absent")])
def test_a_shape_mismatch_names_the_parameter_and_both_shapes(name, shape):
    shard = stack_regions(f"{name}.weight", [take_all(HFTensor("t", 2, 2, "mlp_in"))])
    with pytest.raises(AssertionError, match=rf"a.weight is \(3, 2\) in Megatron, {shape}"):
        _load(torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3, bias=False)}), None, [shard], None)


def test_swiglu_adds_no_tensors_to_a_checkpoint():
    layer = SwiGLU(config=TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1))
    layer.tp_group = group = object()  # nothing is sharded, so the group is not used
    assert layer.sharded_state_dict("mlp.activation_func.", (), {"dp_cp_group": group}) == {}
