"""Releasing a colocated engine's memory: torch_memory_saver's requirements are met, or the run is refused."""

from __future__ import annotations

import pytest

from megatron_rl.errors import UserError
from megatron_rl.rollout import memory_saver

MAPS = """7f2c5a000000-7f2c5a0c1000 r--p 00000000 fe:00 11 /site/nvidia/cu13/lib/libcudart.so.13.0.96
7f2c5b000000-7f2c5b001000 rw-p 00000000 00:00 0
7f2c5c000000-7f2c5c001000 r--p 00000000 fe:00 12 /with a space/libcudart.so.12
7ffd0000-7ffd1000 rw-p 00000000 00:00 0 [stack]
"""


@pytest.fixture
def maps(tmp_path):
    (tmp_path / "maps").write_text(MAPS)
    return tmp_path / "maps"


def test_the_runtime_is_the_one_that_torch_has_loaded(maps):
    assert str(memory_saver.find_cuda_runtime("13.0", maps)) == "/site/nvidia/cu13/lib/libcudart.so.13.0.96"
    assert str(memory_saver.find_cuda_runtime("12.9", maps).parent) == "/with a space"
    assert memory_saver.find_cuda_runtime("14.0", maps) is None and memory_saver.find_cuda_runtime("13.0") is None


def test_an_engine_finds_the_runtime_and_releases_graphs(maps, monkeypatch):
    find = memory_saver.find_cuda_runtime
    monkeypatch.setattr(memory_saver, "find_cuda_runtime", lambda cuda: find(cuda, maps))
    variables = memory_saver.make_environment({"LD_LIBRARY_PATH": "/other:"}, "13.0")
    assert variables == {"LD_LIBRARY_PATH": "/site/nvidia/cu13/lib:/other", "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "true"}
    assert memory_saver.make_environment({"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"}, None) == {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0"}
    memory_saver.check({}, "13.0")


def test_without_the_runtime_a_colocated_run_is_refused():
    memory_saver.check({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None)
    with pytest.raises(
        UserError, match=r"^placement.kind = 'colocated': .* needs libcudart.so.13, which torch has not loaded; install the"
    ):
        memory_saver.check({}, "13.0")
    with pytest.raises(UserError, match="^PYTORCH_ALLOC_CONF = .*expandable segments"):
        memory_saver.check({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: true"}, None)
