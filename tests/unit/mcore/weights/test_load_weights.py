import pytest
import torch

from megatron_rl.mcore.weights.load_weights import _load
from parallel.shards import HFTensor, stack_regions, take_all


@pytest.mark.parametrize(
    "name, line", [("a", r"a.weight is \(3, 2\) in Megatron, \(2, 2\) in"), ("b", r"a.weight is \(3, 2\) in Megatron, absent")]
)
def test_a_shape_mismatch_names_the_parameter_and_both_shapes(name, line):
    shard = stack_regions(f"{name}.weight", [take_all(HFTensor("t", 2, 2, "mlp_in"))])
    with pytest.raises(AssertionError, match=line):
        _load(torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3, bias=False)}), None, [shard], None)
