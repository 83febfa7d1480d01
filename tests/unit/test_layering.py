"""Imports flow one way, and the heavy libraries stay in the files that may know them."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {  # launch, tools -> rollout_sglang -> megatron_rl -> parallel
    "parallel": {"parallel"},
    "megatron_rl": {"megatron_rl", "parallel"},
    "rollout_sglang": {"rollout_sglang", "megatron_rl", "parallel"},
    "tools": {"rollout_sglang", "megatron_rl", "parallel"},
    "launch": {"rollout_sglang", "megatron_rl", "parallel"},
}
OURS = set(MAY_IMPORT)
GPU_PARTS = ("tools/gpu_parts/quantisers.py", "tools/gpu_parts/products.py")  # compare the libraries' own kernels
ONLY_IN = {
    "sglang": ("rollout_sglang/*", *GPU_PARTS),
    "megatron": ("megatron_rl/mcore/*",),
    "triton": ("megatron_rl/precision/backends/triton_quantize.py", "parallel/digest_triton.py"),
    "deep_gemm": ("megatron_rl/precision/backends/deep_gemm*.py", *GPU_PARTS),
    "transformer_engine": ("megatron_rl/precision/backends/transformer_engine.py",),
    "transformer_engine_torch": ("megatron_rl/precision/backends/transformer_engine.py",),
}
TORCH_FREE = (
    "megatron_rl.config",
    "megatron_rl.cli",
    "megatron_rl.precision.graph.graph",
    "megatron_rl.precision.graph.decoder",
    "megatron_rl.observability.hang_watchdog",
    "megatron_rl.cli.plan",
    "megatron_rl.config.cross_checks",
    "megatron_rl.rollout.engine_placement",
    "parallel.layout",
    "rollout_sglang",
)


def imported(file: Path) -> set[str]:
    """The top-level names that a file imports anywhere, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0] if not node.level else file.relative_to(ROOT).parts[0])
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_flow_one_way(package):
    for file in sorted((ROOT / package).rglob("*.py")):
        path, names = str(file.relative_to(ROOT)), imported(file)
        assert names & OURS <= MAY_IMPORT[package], f"{path} imports {names & OURS - MAY_IMPORT[package]}"
        for library, places in ONLY_IN.items():
            assert library not in names or any(fnmatch(path, place) for place in places), f"{path} imports {library}"


def test_what_only_a_gpu_has_is_imported_when_needed():
    """Every module of the back ends loads without it, but the kernel, which nothing imports at module level."""
    kernel = ROOT / "megatron_rl/precision/backends/triton_quantize.py"
    modules = [
        f"megatron_rl.precision.backends.{file.stem}"
        for file in kernel.parent.glob("*.py")
        if file not in (kernel, kernel.parent / "__init__.py")
    ]
    loaded = "[m for m in ('triton', 'deep_gemm', 'transformer_engine') if m in sys.modules]"
    code = f"import sys, {', '.join(modules)}; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize("module", TORCH_FREE)
def test_light_modules_stay_light(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'megatron', 'sglang', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_foreign_package_named_parallel_is_refused(tmp_path):
    (tmp_path / "parallel.py").write_text("")
    (tmp_path / "megatron_rl").symlink_to(ROOT / "megatron_rl")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import megatron_rl"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"ImportError: megatron_rl found a foreign package `parallel` at {tmp_path}/parallel.py")
