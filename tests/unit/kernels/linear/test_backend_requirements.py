"""A backend that cannot run is refused before anything starts, with what is missing and how to get it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.geometries import PUBLISHED

from examples.arithmetic.config import ArchitectureConfig
from examples.arithmetic.new_model import make_hf_config
from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.kernels.linear import requirements
from megatron_rl.preflight import Facts, Needs, check, find_mistakes
from parallel.formats import FP8
from parallel.layout import Layout
from parallel.model_geometry import ModelGeometry

GPU_BACKENDS = ("transformer_engine", "deep_gemm")


@pytest.fixture
def hopper(monkeypatch):
    """Simulate a machine on which every backend can run."""
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    versions = {"sgl-deep-gemm": "0.2.3.post2", "triton": "3.9.0", "transformer-engine": "2.20.2"}
    monkeypatch.setattr(requirements, "find_version", versions.get)
    monkeypatch.setattr(requirements, "find_nvcc", lambda: "/usr/local/cuda/bin/nvcc")
    return versions


def check_machine(**precision: str) -> None:
    sections = {"model": {"path": Path("m")}, "precision": precision, "sync": {"transport": "gloo"}}  # works on a GPU and without
    check(Facts(Config.model_validate(sections)), Needs.TRAINER | Needs.MACHINE)


def refused(backend: str) -> str:
    with pytest.raises(UserError) as caught:
        check_machine(backend=backend)
    return str(caught.value)


def test_a_whole_machine_can_run_them_all(hopper):
    assert all(requirements.find_missing(name) == [] for name in requirements.BACKENDS)
    for name in requirements.BACKENDS:
        check_machine(backend=name)


def test_everything_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(requirements, "find_version", {}.get)
    monkeypatch.setattr(requirements, "find_nvcc", lambda: None)
    check_machine(backend="deep_gemm", mode="bf16")  # a mode without FP8 layers needs none
    line = refused("deep_gemm")
    missing = "torch is a CPU build, sgl-deep-gemm is not installed, triton is not installed, no nvcc to compile its kernels"
    assert line.startswith(f"precision.backend = 'deep_gemm': cannot run here: {missing}; install torch's CUDA build")
    assert "pip install sgl-deep-gemm==0.2.3.post2" in line and line.endswith("or use emulated")


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_another_gpu_or_an_older_cuda_is_refused(hopper, monkeypatch, backend):
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    assert "torch is built for CUDA 12.4" in refused(backend)
    for capability, name in (((8, 0), "NVIDIA A100"), ((12, 0), "NVIDIA RTX PRO 6000 Blackwell")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert f"{name} is neither a Hopper nor a Blackwell GPU" in refused(backend)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in refused(backend)


def facts_on(capability: tuple[int, int], family: str = "", **precision: str) -> Facts:
    sections = {"model": {"path": Path("m")}, "precision": precision}
    return Facts(Config.model_validate(sections), PUBLISHED[family] if family else {}, node_gpus=8, capability=capability)


@pytest.mark.parametrize("backend", requirements.BACKENDS)
@pytest.mark.parametrize("mode", ["fp8_unified", "fp8_rollout"])
def test_blackwell_needs_scales_that_are_powers_of_two(mode, backend):
    def find(capability: tuple[int, int], scale_format: str, mode: str = mode) -> list[str]:
        facts = facts_on(capability, mode=mode, backend=backend, scale_format=scale_format)
        return [str(mistake) for _, mistake in find_mistakes(facts, Needs.ENGINE)]

    rule = "is not supported on Blackwell, whose tensor cores apply only the exponent of a block's scale"
    for capability in ((10, 0), (10, 3)):
        assert f"precision.scale_format = 'fp32': {rule}; use pow2" in find(capability, "fp32")
        assert not find(capability, "pow2") and not find(capability, "pow2", "int8_rollout")
    assert not find((9, 0), "fp32")


@pytest.mark.parametrize("backend", requirements.BACKENDS)
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_experts_train_in_fp8_on_hopper_and_blackwell(capability, backend):
    facts = facts_on(capability, "Qwen3-30B-A3B", mode="fp8_unified", backend=backend)
    assert not [mistake for _, mistake in find_mistakes(facts, Needs.ENGINE) if "Blackwell" in str(mistake)]


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_whole_blackwell_machine_can_run_them(hopper, monkeypatch, backend):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    check_machine(backend=backend)


@pytest.mark.parametrize("package, version, backend", [
    ("sgl-deep-gemm", "0.3.0", "deep_gemm"),
    ("sgl-deep-gemm", "0.1.9", "deep_gemm"),
    ("transformer-engine", "2.11.0", "transformer_engine"),
    ("transformer-engine", "2.21.0+abc", "transformer_engine"),
])  # fmt: skip
def test_an_unknown_version_is_refused(hopper, package, version, backend):
    hopper[package] = version
    assert f"{package} {version} is not a supported version" in refused(backend)


def test_experts_need_deep_gemm_whatever_multiplies_the_rest_and_the_original_package_will_do(hopper):
    assert requirements.find_missing("transformer_engine", experts=True) == []
    del hopper["sgl-deep-gemm"]
    assert requirements.find_missing("transformer_engine") == []
    (missing,) = requirements.find_missing("transformer_engine", experts=True)
    assert missing[0] == "sgl-deep-gemm is not installed"
    assert requirements.find_missing("emulated", experts=True) == []
    assert "sgl-deep-gemm is not installed" in refused("deep_gemm")
    hopper["deep_gemm"] = "2.6.1+54e2261"
    check_machine(backend="deep_gemm")
    hopper["deep_gemm"] = "2.7.0"
    assert "deep_gemm 2.7.0 is not a supported version, 2.1 to below 2.7" in refused("deep_gemm")


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_the_last_rows_of_a_latent_projection_may_be_a_partial_block(backend):
    """`kv_a_proj_with_mqa` has 512 + 64 rows."""
    widths = {"num_hidden_layers": 4, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
    model = ModelGeometry.from_hf_config({**PUBLISHED["DeepSeek-V3"], **widths})
    requirements.check_model(backend, FP8, model, Layout(tp=4, ep=4, etp=1))
    odd = replace(model, attention=(replace(model.attention[0], rope_dim=72),) * model.layers)
    with pytest.raises(UserError, match=r"linear_kv_down_proj.weight is \[584, 7168\]"):
        requirements.check_model(backend, FP8, odd, Layout())


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_weights_that_are_cut_within_a_block_are_refused(backend):
    def geometry(**changes: int) -> ModelGeometry:
        widths = dict(hidden_size=512, intermediate_size=512, head_dim=128, num_attention_heads=4, num_key_value_heads=2) | changes
        return ModelGeometry.from_hf_config(make_hf_config(ArchitectureConfig(**widths), 0, "bf16"))

    requirements.check_model(backend, FP8, geometry(), Layout(tp=2))
    uneven = geometry(intermediate_size=384)
    with pytest.raises(
        UserError, match=r"widths in multiples of 128, and .*linear_fc2.weight is \[512, 192\] .*; use emulated, or .*tp = 1"
    ):
        requirements.check_model(backend, FP8, uneven, Layout(tp=2))
    small_heads = geometry(head_dim=64, num_attention_heads=8, num_key_value_heads=4)
    requirements.check_model(backend, FP8, small_heads, Layout(tp=2))  # two heads of 64 are a block
    line = r"blocks of only one of q, k and v, .*linear_qkv.weight would mix them .* use emulated, or train.layout.tp = 1 or 2"
    with pytest.raises(UserError, match=line):
        requirements.check_model(backend, FP8, small_heads, Layout(tp=4))
    requirements.check_model("emulated", FP8, uneven, Layout(tp=2))


def test_a_deep_gemm_that_cannot_be_asked_for_its_mode_has_no_deterministic_one(tmp_path, monkeypatch):
    (tmp_path / "deep_gemm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    for names, known in (("bf16_gemm_nt", False), ("bf16_gemm_nt = get_deterministic_algorithms", True)):
        (tmp_path / "deep_gemm" / "__init__.py").write_text(f"{names} = None\n")
        assert requirements.has_deterministic_mode() is known
