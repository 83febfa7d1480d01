"""The plug-in's entry point, as SGLang finds it in this environment: it patches this project's engines and no other process."""

import json
import os
import subprocess
import sys

import pytest
import torch

from rollout_sglang.hooks import registry
from rollout_sglang.platform.activate import NAME

LOAD = """
import json
from rollout_sglang.platform import stub_modules
stub_modules.install()  # a CPU's environment may lack triton
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins, load_plugins_by_group
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.sampler import Sampler
names = [RMSNorm.forward_native.__module__, Sampler.forward.__module__]
print(json.dumps([sorted(load_plugins_by_group(GENERAL_PLUGINS_GROUP)), sorted(HookRegistry._patched), names]))
"""


def load(**more: str) -> tuple[list[str], set[str], list[str]]:
    """Return the plug-ins that a process of SGLang finds, and what they have patched."""
    environment = {name: value for name, value in os.environ.items() if name != registry._ENGINE_VARIABLE} | more
    done = subprocess.run([sys.executable, "-c", LOAD], env=environment, capture_output=True, text=True, check=True)
    found, patched, modules = json.loads(done.stdout.splitlines()[-1])
    return found, set(patched), modules


def test_a_foreign_process_finds_the_plug_in_and_stays_as_it_is():
    found, patched, modules = load(SGLANG_PLUGINS="megatron_rl")
    assert "megatron_rl" in found and not patched
    assert modules == ["sglang.srt.layers.layernorm", "sglang.srt.layers.sampler"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the hooks of a CPU")
def test_a_process_of_an_engine_has_every_hook():
    found, patched, _ = load(**{registry._ENGINE_VARIABLE: "1", "SGLANG_PLATFORM": NAME})
    assert "megatron_rl" in found and patched == {target for target, _, _ in registry._list_hooks()}


VERIFY = """
import sys
from rollout_sglang.platform import stub_modules
stub_modules.install()
sys.modules["sglang.srt.models.qwen2_moe"] = None  # other models import it
from rollout_sglang.hooks import registry
registry.verify()
"""


@pytest.mark.long
def test_an_engine_whose_hooks_cannot_be_applied_ends_with_the_error_that_sglang_only_logs():
    environment = os.environ | {"SGLANG_PLATFORM": NAME}
    done = subprocess.run([sys.executable, "-c", VERIFY], env=environment, capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("RuntimeError: SGLang did not apply the hooks on sglang.srt.")
    assert "sglang.srt.models.qwen2_moe.Qwen2MoeSparseMoeBlock.__init__" in last
    assert last.endswith(", because of ModuleNotFoundError: import of sglang.srt.models.qwen2_moe halted; None in sys.modules")


def test_the_error_of_a_target_is_that_of_its_module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_a_package.py").write_text("import no_such_package")
    (tmp_path / "needs_nothing.py").write_text("class Layer: ...")
    assert str(registry.find_import_error("needs_a_package.Layer.forward")) == "No module named 'no_such_package'"
    assert str(registry.find_import_error("no_such_module.Layer.forward")) == "No module named 'no_such_module'"
    assert registry.find_import_error("needs_nothing.Layer.forward") is None  # the class has no such function


def test_each_error_is_named_once():
    errors = [ModuleNotFoundError("No module named 'flashinfer'")] * 10 + [AttributeError("forward")]
    reasons = "ModuleNotFoundError: No module named 'flashinfer'; AttributeError: forward"
    assert registry.explain_missing(["a.b", "c.d"], errors) == f"SGLang did not apply the hooks on a.b, c.d, because of {reasons}"
    assert registry.explain_missing(["a.b"], []) == "SGLang did not apply the hooks on a.b"
