"""The rehearsal's parts: bytes that operators move, bounds of a step, shapes, the pretended GPU, and signatures of installed libraries."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from types import SimpleNamespace

import pytest
import torch
from support.processes import ROOT
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_rl.cost.hardware import GPUS, LINK_EFFICIENCY, Cluster
from megatron_rl.rehearsal import hopper, signatures
from megatron_rl.rehearsal.bound import estimate_bound
from megatron_rl.rehearsal.kernels import transformer_engine
from megatron_rl.rehearsal.recorder import Recorder
from megatron_rl.rehearsal.shapes import ShapeRunner, describe_call
from megatron_rl.rehearsal.traffic import count_bytes, count_moved, name_kind

aten = torch.ops.aten


def new(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


X, ROW, TABLE, PLACES = new(4, 8), new(8), new(1000, 8), new(6, dtype=torch.int64)
CASES = [
    (aten.empty.memory_format, ([4, 8],), 0),
    (aten.empty_like.default, (X,), 0),
    (aten.new_empty.default, (X, [4, 8]), 0),
    (aten._unsafe_view.default, (X, [32]), 0),
    (aten.view.default, (X, [32]), 0),
    (aten.detach.default, (X,), 0),
    (aten.add.Tensor, (X, X), 2 * 128),
    (aten.add.Tensor, (X, new(4, 8)), 3 * 128),
    (aten.add.Tensor, (X, ROW.expand(4, 8)), 2 * 128 + 32),
    (aten.add_.Tensor, (X, new(4, 8)), 3 * 128),
    (aten.mul_.Tensor, (X, new(4, 8)), 3 * 128),
    (aten.copy_.default, (X, new(4, 8, dtype=torch.bfloat16)), 128 + 64),
    (aten.copy_.default, (X, ROW.expand(4, 8)), 128 + 32),
    (aten.zero_.default, (X,), 128),
    (aten.fill_.Scalar, (X, 1.0), 128),
    (aten.zeros_like.default, (X,), 128),
    (aten.mm.default, (X, new(8, 2)), 128 + 64 + 32),
    (aten.embedding.default, (TABLE, PLACES), 2 * 192 + 48),
    (aten.index.Tensor, (TABLE, [PLACES]), 2 * 192 + 48),
    (aten.index_select.default, (TABLE, 0, PLACES), 2 * 192 + 48),
    (aten.index_put_.default, (TABLE, [PLACES], new(6, 8)), 48 + 2 * 192),
    (aten.index_add_.default, (TABLE, 0, PLACES, new(6, 8)), 48 + 3 * 192),
    (aten._foreach_add_.List, ([X, ROW], [new(4, 8), new(8)]), 3 * 160),
    (aten._foreach_mul_.Scalar, ([X, ROW], 2.0), 2 * 160),
    (aten._foreach_copy_.default, ([X, ROW], [new(4, 8), new(8)]), 2 * 160),
    (aten._foreach_zero_.default, ([X, ROW],), 160),
]


@pytest.mark.parametrize(("func", "args", "nbytes"), CASES, ids=[f"{func}-{nbytes}" for func, _, nbytes in CASES])
def test_an_operator_moves_what_its_kernel_reads_and_writes(func, args, nbytes):
    assert count_moved(func, args, {}, func(*args) if func is not aten.empty.memory_format else X) == nbytes


def test_a_given_result_is_not_read_attention_counts_once_and_an_expanded_tensor_has_the_bytes_of_its_storage():
    result = new(4, 8)
    assert count_moved(aten.mul.out, (X, new(4, 8)), {"out": result}, result) == 3 * 128
    assert count_moved(aten.mul.out, (X, new(4, 8)), {"out": X}, X) == 3 * 128
    assert count_bytes(ROW.expand(4, 8)) == 32 and count_bytes(new(0, 8)) == 0
    from torch.nn.attention import varlen  # noqa: F401 - registers the operators

    # the kernel's shape function counts it (`rehearsal.kernels.flash_attention`)
    assert count_moved(torch.ops.torch_attn._varlen_attn_backward.default, (X, X), {}, X) == 0


def test_kinds_follow_dtype_and_line():
    assert name_kind("aten::mm", "bf16", "megatron_rl/mcore/passes/logprobs.py:3") == "bf16 products"
    assert name_kind("", "other", "megatron_rl/kernels/heads/triton.py:3") == "queries and keys"
    assert name_kind("", "attention", "megatron_rl/mcore/x.py:3") == "attention"
    assert name_kind("aten::add", "other", "megatron/core/distributed/param_and_grad_buffer.py:9") == "gradient buffers"


def bound_phase(phase, micro_batches: int, nodes: int):
    job = SimpleNamespace(config=SimpleNamespace(algorithm=SimpleNamespace(updates_per_step=1)), has_reference=False)
    candidate = SimpleNamespace(train=SimpleNamespace(vpp=1), micro_batches=lambda _: micro_batches)
    return estimate_bound(phase, job, candidate, Cluster.from_options(nodes, 8, "h100"))


def test_a_bound_multiplies_passes_alone_and_takes_the_link_that_a_group_has():
    recorder = Recorder()
    phase = recorder.begin("update 2")
    phase.passes, recorder.in_pass = 2, True
    recorder.work("fp8", 10**12, X)
    recorder.collective("all-gather", "tp 2", 10**9, [0, 1])
    recorder.collective("send", "pp 2", 10**9, [0, 8])
    recorder.collective("reduce-scatter", "dp 2", 10**9, [0, 8])  # gradients, in the step's last backward pass
    recorder.in_pass = False
    recorder.work("other", 0, X, X, kernel="norm")
    recorder.collective("all-gather", "dp 2", 10**9, [0, 8])
    bound = bound_phase(phase, micro_batches=20, nodes=2)
    assert bound.passes == 20
    assert bound.seconds["fp8 products"] == pytest.approx(10**13 / GPUS["h100"].rates["fp8"])
    assert bound.seconds["norms"] == pytest.approx(256 / (3.35e12 * LINK_EFFICIENCY))
    assert bound.seconds["exposed communication"] == pytest.approx((10 * 0.5e9 / 450e9 + 0.5e9 / 50e9) / LINK_EFFICIENCY)
    assert bound.hidden == pytest.approx((10 * 1e9 + 0.5e9) / 50e9 / LINK_EFFICIENCY)


@pytest.mark.parametrize("products, exposed", [(0, 3.0), (1, 2.0), (2, 1.0), (4, 0.0)])
def test_exchange_is_hidden_as_far_as_kernels_run_between_its_start_and_the_wait(products, exposed):
    """Two exchanges of one and two seconds over one link, and a third that is waited for immediately."""
    recorder, second = Recorder(), 450e9 * LINK_EFFICIENCY
    phase = recorder.begin("update 2")
    phase.passes, recorder.in_pass = 1, True
    waits = [recorder.collective("send", "tp 2", seconds * second, [0, 1]) for seconds in (1, 2)]
    recorder.work("fp8", products * GPUS["h100"].rates["fp8"])
    for wait in waits:
        wait()
        wait()
    recorder.collective("send", "tp 2", second / 2, [0, 1])()
    bound = bound_phase(phase, micro_batches=3, nodes=1)
    assert bound.seconds["exposed communication"] == pytest.approx(3 * (exposed + 0.5))
    assert bound.hidden == pytest.approx(3 * (3 - exposed), abs=1e-9)


aten = torch.ops.aten


@pytest.mark.parametrize("args", [(0, 1, 3), (1, None, None), (1, -4, -1), (0, 3, 1), (-1, 2, 1 << 62), (1, 5, 9), (0, 9, 12)])
def test_a_slice_is_where_torch_puts_it(args):
    runner, whole = ShapeRunner(), FakeTensorMode().from_tensor(torch.empty(10, 14, dtype=torch.bfloat16))[2:8, 7:]
    description, tensors = describe_call((whole, *args), {})
    found, known = runner.run(aten.slice.Tensor, (whole, *args), {}, description, tensors)
    expected = aten.slice.Tensor(torch.empty(10, 14, dtype=torch.bfloat16)[2:8, 7:], *args)
    assert known is not None and (found.dtype, found.device) == (expected.dtype, expected.device)
    assert (found.shape, found.stride()) == (expected.shape, expected.stride())
    assert found.storage_offset() == expected.storage_offset() or not expected.numel()


DEEP_GEMM = """
def fp8_gemm_nt(a, b, d, c=None, recipe=None, alpha=None): ...
def bf16_gemm_nt(a, b, d): ...
def use_deterministic_algorithms(enable): ...
def get_deterministic_algorithms(): ...
def m_grouped_fp8_gemm_nt_contiguous(a, b, d, grouped_layout, recipe=None): ...
def k_grouped_fp8_gemm_nt_contiguous(a, b, d, ks, grouped_layout, c=None, recipe=(1, 1, 128)): ...
def k_grouped_fp8_gemm_tn_contiguous(a, b, d, ks, grouped_layout, c=None, recipe=(1, 1, 128)): ...
def get_mk_alignment_for_contiguous_layout(*args, **kwargs): ...
"""
GEMM = "transformer_engine.pytorch.cpp_extensions.gemm.general_gemm"
GEMM_SOURCE = """
import transformer_engine_torch as tex
def general_gemm(A: tex.Tensor, B, out_dtype=None, accumulate=False, layout="TN", out=None, use_split_accumulator=False, grad=False): ...
"""


@pytest.mark.skipif(any(distributions(name="triton")), reason="the GPU packages are installed")
def test_a_renamed_parameter_is_named_with_its_library_and_function(tmp_path):
    def compare() -> list[str]:
        code = "from megatron_rl.rehearsal import hopper, signatures\nfrom megatron_rl.rehearsal.kernels import deep_gemm\n"
        code += "hopper.pretend()\nprint(*signatures.compare(deep_gemm.STANDS_FOR), sep='\\n')"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    (tmp_path / "deep_gemm.py").write_text(DEEP_GEMM)
    assert compare() == [""]
    (tmp_path / "deep_gemm.py").write_text(
        DEEP_GEMM.replace("ks, grouped_layout", "ks, m_indices").replace("fp8_gemm_nt(a, b, d, c=None", "fp8_gemm_nt(a, b, c, d")
    )
    functions = [f"deep_gemm.k_grouped_fp8_gemm_{order}_contiguous" for order in ("nt", "tn")]
    assert compare() == [
        "deep_gemm.fp8_gemm_nt has its parameter d at place 3, the rehearsal at 2",
        "deep_gemm.fp8_gemm_nt has its parameter c at place 2, the rehearsal at 3",
        *(
            line
            for function in functions
            for line in (
                f"{function} has no parameter grouped_layout: it has a, b, d, ks, m_indices, c, recipe",
                f"{function} needs a parameter m_indices, which the rehearsal does not know",
            )
        ),
    ]


def test_a_function_that_cannot_be_imported_is_read_from_its_file(tmp_path, monkeypatch):
    (file := tmp_path / "transformer_engine" / "pytorch" / "cpp_extensions" / "gemm.py").parent.mkdir(parents=True)
    (tmp_path / "transformer_engine" / "__init__.py").write_text("raise RuntimeError\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    own = {GEMM: transformer_engine.STANDS_FOR[GEMM]}
    file.write_text(GEMM_SOURCE)
    assert signatures.compare(own) == []
    file.write_text(GEMM_SOURCE.replace("use_split_accumulator", "split"))
    assert [line.partition(":")[0] for line in signatures.compare(own)] == [f"{GEMM} has no parameter use_split_accumulator"]
    file.write_text("")
    (line,) = signatures.compare(own)
    assert line.startswith(f"{GEMM} is not found")


USER = "extern int cuInit(unsigned); extern int cublasCreate_v2(void *); int use(void) { return cuInit(0) + cublasCreate_v2(0); }"
ASK = """
import ctypes, sys
from megatron_rl.rehearsal import hopper
print(ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL).cuInit(0))
count = ctypes.c_int()
ctypes.CDLL(None).cudaGetDeviceCount(ctypes.byref(count))
hopper.pretend(mem_get_info=lambda: (1, 2))
import torch
print(count.value, torch.cuda.get_device_capability("cuda:0"), torch.cuda.get_device_name(), torch.cuda.mem_get_info())
"""


def test_libraries_that_want_a_driver_are_loaded_without_one(tmp_path):
    (tmp_path / "packages").mkdir()
    hopper._compile(tmp_path / "libcuda.so.1", "int cuInit(unsigned flags) { return 0; }")
    user = tmp_path / "packages" / "user.so"
    command = ["gcc", "-x", "c", "-", "-shared", "-fPIC", "-o", str(user), "-x", "none", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, input=USER, text=True, check=True)
    (tmp_path / "packages" / "no_library.so").write_text("text")
    assert hopper.find_driver_symbols(tmp_path / "packages") == {"cuInit"}
    variables = hopper.build_stubs(tmp_path / "stubs", tmp_path / "packages")
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ASK, "libcuda.so.1"], env=environment, capture_output=True, text=True)
    assert done.stdout == "100\n1 (9, 0) NVIDIA H100 80GB HBM3 (1, 2)\n", done.stderr
