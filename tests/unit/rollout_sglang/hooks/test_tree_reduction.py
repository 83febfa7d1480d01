"""Row-parallel layers on a GPU with the contract's operands and SGLang's own collectives, tested with fake GPU libraries."""

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import fake_gpu_libraries
from support.fp8_reference import uneven, uneven_matrix

from megatron_rl.kernels.linear.reference import fprop_by_tree
from megatron_rl.kernels.sums import reference as tree
from megatron_rl.precision.fp8 import quantize_weight
from rollout_sglang import derived_tensors
from rollout_sglang.hooks import gpu_activation_quant, tree_reduction

SGLANG = Path(find_spec("sglang").origin).parent
RANKS = 2


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    fake_gpu_libraries.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv(gpu_activation_quant.SCALE_FORMAT_VARIABLE, "fp32")
    gpu_activation_quant.get_scale_format.cache_clear()
    yield
    gpu_activation_quant.get_scale_format.cache_clear()


def test_products_are_the_trainers():
    x, values = uneven(5, 512, torch.bfloat16), uneven_matrix(256, 512)
    weight = values.bfloat16()
    layer = SimpleNamespace(quant_method=type("UnquantizedLinearMethod", (), {})(), weight=weight)
    assert torch.equal(tree_reduction.multiply_on_gpu(layer, x), tree.multiply(x, weight))
    blocks = quantize_weight(values, "fp32")
    layer = SimpleNamespace(quant_method=type("Fp8LinearMethod", (), {})(), weight=blocks.data, weight_scale_inv=blocks.scale)
    exact = fprop_by_tree(x, fake_gpu_libraries.dequantize((x, torch.ones(5, 4)), blocks)[1], "fp32")
    assert torch.equal(tree_reduction.multiply_on_gpu(layer, x), exact)
    with pytest.raises(NotImplementedError, match="SGLang has already quantized"):
        tree_reduction.multiply_on_gpu(layer, (blocks.data, blocks.scale))


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_products_of_slices_are_those_of_ranks(slices, monkeypatch):
    """With `precision.reduction = "ranks"` and a trainer of more ranks. DeepGEMM gets each slice's operands as a rank would hold them, with
    scales that were copied at the last sync, where CUDA graphs read them."""
    x, values = uneven(5, 512, torch.bfloat16), uneven_matrix(256, 512)
    blocks = quantize_weight(values, "fp32")

    def load(data, scale, count):
        layer = SimpleNamespace(quant_method=type("Fp8LinearMethod", (), {})(), weight=data, weight_scale_inv=torch.zeros_like(scale))
        layer.tp_group, layer.input_is_parallel = Group(), True
        monkeypatch.setattr(tree_reduction, "count_slices", lambda ranks: count)
        runner = SimpleNamespace(model=SimpleNamespace(modules=lambda: [layer, SimpleNamespace(weight_scale_inv=scale)]))
        tree_reduction.load_model(lambda _: None, runner)
        kept = getattr(layer.weight_scale_inv, tree_reduction.CUT)
        layer.weight_scale_inv.copy_(scale)
        derived_tensors.refresh(runner.model)
        assert kept.is_contiguous() and kept is getattr(layer.weight_scale_inv, tree_reduction.CUT) and kept.all()
        return layer

    products = tree_reduction.multiply_on_gpu(load(*blocks, slices), x, slices)
    width = 512 // slices
    for number, product in enumerate(products):
        own = slice(number * width, (number + 1) * width)
        layer = load(blocks.data[:, own].contiguous(), blocks.scale.chunk(slices, 1)[number].contiguous(), 1)
        (alone,) = tree_reduction.multiply_on_gpu(layer, x[:, own].contiguous(), 1)
        assert product.dtype == torch.bfloat16 and torch.equal(product, alone)
    summed = tree_reduction.add_slices(products, Group(), torch.bfloat16)
    assert torch.equal(summed, tree.add_ranks(torch.cat([products, products])))  # the other rank has the same
    plain = SimpleNamespace(quant_method=type("UnquantizedLinearMethod", (), {})(), weight=values.bfloat16())
    assert tree_reduction.multiply_on_gpu(plain, x, slices).shape == (slices, 5, 256)


def test_the_installed_all_reduce_adds_in_the_order_of_ranks():
    """What docs/decisions.md cites. Another release must be read again."""
    kernels = SGLANG / "kernels/jit"
    adding = (kernels / "include/sgl_kernel/vec.cuh").read_text()
    assert "for (size_t i = 0; i < M; ++i)" in adding and "acc[j].x = i == 0 ? x : acc[j].x + x;" in adding
    summing = (kernels / "csrc/distributed/custom_all_reduce.cuh").read_text()
    assert (
        summing.count("reduce_vec(vec") == 3 and "vecs[i].load(m_data[i], vid);" in summing and "if (i == r) vec[i] = local_vec;" in summing
    )
    library = (SGLANG / "srt/distributed/device_communicators/custom_all_reduce_v2.py").read_text()
    assert "can_use_multicast = self.config.num_mc_blocks is not None" in library
    assert {"should_custom_ar", "custom_all_reduce"} <= {
        node.name for node in ast.walk(ast.parse(library)) if isinstance(node, ast.FunctionDef)
    }


class Group:
    """A group of SGLang whose other rank has the negative halves of this rank's partial sums. Calling `torch.distributed` with it fails."""

    world_size, rank_in_group = RANKS, 0

    def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(torch.cat([input, input if input.dtype == torch.bfloat16 else input / -2]))

    def all_to_all_single(self, output: torch.Tensor, input: torch.Tensor) -> None:
        own = input.chunk(RANKS)[0]
        output.copy_(torch.cat([own, own / -2]))


@pytest.mark.parametrize("rows", [3, 301])
def test_partial_sums_are_added_by_the_groups_own_collectives(rows):
    partial = uneven(rows, 256, torch.float32)
    y = tree_reduction.add_over_ranks(partial, Group(), torch.bfloat16)
    half = -(-rows // RANKS)
    wanted = partial if rows == 3 else torch.cat([partial[:half], partial[:half]])[:rows]  # this rank's tokens come back for the other's
    assert y.dtype == torch.bfloat16 and torch.equal(y, (wanted - wanted / 2).bfloat16())


def test_the_installed_release_has_the_names_that_are_used():
    """Its collectives call NCCL directly, which its CUDA graphs capture."""
    functions: dict[str, ast.FunctionDef] = {}
    for file, owner in (("linear", "RowParallelLinear"), ("../distributed/parallel_state", "GroupCoordinator")):
        nodes = ast.walk(ast.parse((SGLANG / "srt/layers" / f"{file}.py").read_text()))
        body = next(node for node in nodes if isinstance(node, ast.ClassDef) and node.name == owner).body
        functions |= {f"{owner}.{node.name}": node for node in body if isinstance(node, ast.FunctionDef)}
    for name in ("all_gather_into_tensor", "all_to_all_single"):
        assert [each.arg for each in functions[f"GroupCoordinator.{name}"].args.args] == ["self", "output", "input"]
        assert "pynccl_comm" in ast.unparse(functions[f"GroupCoordinator._{name}"])
    forward = functions["RowParallelLinear.forward"]
    assert [each.arg for each in forward.args.args] == ["self", "input_", "skip_all_reduce", "forward_batch", "output_tensor"]
    read = {node.attr for node in ast.walk(forward) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    assert {"quant_method", "input_is_parallel", "use_decode_attn_tp", "reduce_results", "skip_bias_add", "bias", "tp_group"} <= read
