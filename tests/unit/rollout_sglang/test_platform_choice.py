"""SGLang asks every platform plug-in where none is chosen: on a GPU this project's for CPUs must not answer."""

from __future__ import annotations

from rollout_sglang.platform.activate import NAME, activate


def test_the_cpu_platform_answers_only_when_it_is_chosen(monkeypatch):
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    assert activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", NAME)
    assert activate() == "rollout_sglang.platform.cpu.CpuPlatform"
