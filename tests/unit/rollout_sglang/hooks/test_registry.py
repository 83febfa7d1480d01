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
