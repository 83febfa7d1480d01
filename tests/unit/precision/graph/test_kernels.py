"""Identity of kernels: names, versions and orders, and what is refused if one of them differs."""

import functools
from dataclasses import replace

import pytest
import torch

from megatron_rl.diagnosis import graph_check
from megatron_rl.distributed import Rank0
from megatron_rl.errors import RunError
from megatron_rl.kernels import batch_invariant
from megatron_rl.kernels.norm import reference as norm
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.precision.graph import kernels
from megatron_rl.precision.graph.decoder import LayerPrecision, Operator, decoder_graph
from megatron_rl.precision.graph.graph import GRAPH_JSON, PrecisionGraph, TensorPrecision, compare_kernels, merge_graphs
from megatron_rl.precision.graph.kernels import Kernel, Machine, compare, identify, in_parts, read_machine

HIGH = TensorPrecision("bf16")
NORM = Kernel("kernels.norm.triton.normalize", "0a1b2c3d")
FLASH = Kernel("sgl_kernel.flash_attn", "sglang-kernel 0.4.10", "1 splits")
H200 = Machine("NVIDIA H200", ("torch 2.13.0", "triton 3.8.0"))


def graph(norm: Kernel | None = NORM, attention: Kernel = FLASH, machine: Machine = H200) -> PrecisionGraph:
    others = ("attention.qkv", "attention.output", "post_attention_norm", "mlp.gate_up", "mlp.down")
    operators = {"input_norm": Operator({"x": HIGH}, kernel=norm)} | {name: Operator({"x": HIGH}, kernel=NORM) for name in others}
    layer = LayerPrecision(operators, HIGH, HIGH, kernels={"attention": attention, "rope": NORM, "swiglu": NORM})
    return replace(decoder_graph(HIGH, {0: layer, 1: layer}, {}), machine=machine)


def test_an_identity_names_the_function_that_runs_and_its_source():
    alone = identify(norm.normalize)
    assert alone.name == "kernels.norm.reference.normalize"
    on_gpu = identify(norm.normalize, on_gpu=True)
    assert on_gpu.name == "kernels.norm.triton.normalize" and on_gpu.version != alone.version
    assert identify(batch_invariant.rms_norm, on_gpu=True).name == "kernels.batch_invariant.rms_norm", "it has no Triton kernel"
    assert identify(functools.partial(norm.normalize, eps=1e-6)) == alone
    bound = identify(torch.nn.RMSNorm(2).forward)
    assert bound == identify(torch.nn.RMSNorm.forward) and bound.name == "torch.nn.modules.normalization.RMSNorm.forward"
    assert bound.version.startswith(f"torch {torch.__version__}")


@pytest.mark.parametrize("changed", ["megatron_rl.kernels.norm.triton", "megatron_rl.kernels.quantize.triton", "parallel.formats"])
def test_another_source_of_a_kernel_or_of_its_helpers_is_another_identity(monkeypatch, changed):
    """`kernels.quantize` chooses the tiles and alignment of norms."""
    installed, read = identify(norm.normalize, on_gpu=True), kernels._read_source
    monkeypatch.setattr(kernels, "_digest_module", kernels._digest_module.__wrapped__)
    assert identify(norm.normalize, on_gpu=True) == installed
    monkeypatch.setattr(kernels, "_read_source", lambda name: (b"other", ()) if name == changed else read(name))
    assert compare(identify(norm.normalize, on_gpu=True), installed) == "differs"


def test_verdicts():
    other_version, ordered = replace(NORM, version="ffffffff"), Kernel("a", "1", "rows")
    assert compare(NORM, NORM) == "same kernel" and compare(ordered, Kernel("b", "2", "rows")) == "same order"
    for one, other in ((NORM, other_version), (ordered, replace(ordered, version="2")), (NORM, FLASH), (NORM, None), (None, None)):
        assert compare(one, other) == "differs"
    for kernel, other in ((NORM, FLASH), (ordered, Kernel("b", "2", "rows"))):  # without and with a known order
        assert compare(in_parts(kernel, 2), in_parts(kernel, 2)) == "same kernel"
        assert compare(in_parts(kernel, 2), in_parts(other, 2)) == ("same order" if kernel.order else "differs")
        assert all(compare(in_parts(kernel, 2), each) == "differs" for each in (kernel, in_parts(kernel, 4), in_parts(other, 4)))
    verdicts = {each.operator: each.verdict for each in compare_kernels(graph(norm=FLASH), graph())}
    assert verdicts.pop("layers 0..1: input_norm") == "differs"
    assert len(verdicts) == 8 and set(verdicts.values()) == {"same kernel"}, "additions to the residual stream have no order"


PLANTED = {
    "another norm": (
        graph(norm=Kernel("sglang.srt.layers.layernorm.RMSNorm.forward_cuda", "sglang 0.5.23, 11111111")),
        "layers 0..1: input_norm: the engine computes with sglang.srt.layers.layernorm.RMSNorm.forward_cuda (sglang 0.5.23, 11111111), "
        "the trainer with kernels.norm.triton.normalize (0a1b2c3d); start both from one installation",
    ),
    "an unknown norm": (graph(norm=None), "input_norm: the engine computes with an unknown kernel, the trainer with"),
    "another split count": (graph(attention=replace(FLASH, order="0 splits")), "attention.core: the engine computes with sgl_kernel"),
    "another backend": (graph(attention=Kernel("TritonAttnBackend")), "attention.core: the engine computes with TritonAttnBackend"),
    "another package": (graph(attention=replace(FLASH, version="sglang-kernel 0.4.9")), "sgl_kernel.flash_attn (sglang-kernel 0.4.9)"),
    "another torch": (
        graph(machine=replace(H200, packages=("torch 2.12.0", "triton 3.8.0"))),
        "the engine has torch 2.12.0, the trainer torch 2.13.0; install the same versions",
    ),
    "another device": (
        graph(machine=replace(H200, device="NVIDIA H20")),
        "the engine's device is NVIDIA H20, the trainer's NVIDIA H200; use one model of device",
    ),
}


class OtherEngine:
    def __init__(self, rollout: PrecisionGraph) -> None:
        self.read_graph = lambda: [graph(), rollout]


@pytest.mark.parametrize("plant", PLANTED)
def test_a_run_that_promises_exactness_refuses_another_kernel_of_a_rank(plant, tmp_path, monkeypatch):
    rollout, line = PLANTED[plant]
    monkeypatch.setattr(graph_check, "read_training_graph", lambda _: Rank0(graph))
    check = functools.partial(graph_check.check_graph, None, contract=PrecisionContract("bf16", "pow2", "bf16"), folder=tmp_path)
    check(engine=Rank0(lambda: OtherEngine(graph())), exact=True)
    check(engine=Rank0(lambda: OtherEngine(rollout)))
    with pytest.raises(RunError, match="the run promises a mismatch of 0, but ") as refused:
        check(engine=Rank0(lambda: OtherEngine(rollout)), exact=True)
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_machines_are_read_joined_and_survive_json(monkeypatch):
    here = read_machine(torch)
    assert here.packages == (f"torch {torch.__version__}",) and here.device
    joined = merge_graphs([graph(), graph(machine=replace(H200, device="NVIDIA H20"))]).machine
    assert joined == replace(H200, device="NVIDIA H200 and NVIDIA H20")
    assert GRAPH_JSON.validate_json(GRAPH_JSON.dump_json(graph())) == graph()
    monkeypatch.setattr(kernels, "_digest_module", lambda _: "changed")
    assert compare(identify(norm.normalize), replace(identify(norm.normalize), version="0")) == "differs"
