"""tools/gpu_parts.py with a fake pytest and a fake clock: no test is left out, and limits hold."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import gpu_parts
import pytest
from gpu_parts import BUDGET, PARTS, QUICK_BUDGET, WARM_UP, Part, check, choose_parts, find_unused_folder
from support.processes import ROOT, one_thread_environment

A, B, C = (Part(name, (f"test_{name}.py",), 100) for name in "abc")


class Machine:
    """Fake machine: a command takes the seconds and returns the exit code that its part is given."""

    def __init__(self, **results: tuple[float, int]) -> None:
        self.now, self.results, self.ran, self.commands = 0.0, results, list[str](), list[str]()

    def run(self, command, environment) -> int:
        self.ran.append(Path(command[-1]).stem)
        self.commands.append(shlex.join(command))
        seconds, code = self.results.get(self.ran[-1], (10.0, 0))
        self.now += seconds
        return code

    def check(self, parts, folder: Path, budget: float = 1000, options=()) -> int:
        return check(parts, folder, budget, {}, options, self.run, lambda: self.now)


@pytest.mark.long
def test_every_gpu_test_is_in_one_part():
    asked = [test for part in (*PARTS, WARM_UP) for test in part.tests]
    assert {test.partition("::")[0] for test in asked} == {file.name for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    command = [sys.executable, "-m", "pytest", "tests/gpu", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=one_thread_environment(), capture_output=True, text=True)
    collected = re.findall(r"^tests/gpu/(test_.*)$", done.stdout, re.MULTILINE)
    assert len(collected) > 20, done.stdout + done.stderr
    for test in collected:
        assert sum(test == name or test.startswith((f"{name}::", f"{name}[")) for name in asked) == 1, test
    for name in asked:
        assert name.endswith(".py") or any(test.startswith(name) for test in collected), name


def test_limits_fit_into_the_time_for_all():
    assert WARM_UP.seconds + sum(part.seconds for part in PARTS) <= BUDGET == 1500
    quick = choose_parts([], quick=True)
    assert sum(part.seconds for part in quick) <= QUICK_BUDGET == 300 and WARM_UP not in quick
    assert choose_parts([], quick=False) == [WARM_UP, *PARTS] and choose_parts(["speed-sync"], False)[0] == WARM_UP
    with pytest.raises(ValueError, match="nothing: no such part; the parts are kernels, layers"):
        choose_parts(["nothing"], False)


def test_a_part_that_fails_or_needs_longer_is_named_and_the_rest_goes_on(tmp_path, capsys):
    machine = Machine(b=(10, 1))
    assert machine.check([A, B, C], tmp_path) == 1 and machine.ran == ["a", "b", "c"]
    assert f"gpu_check: b: failed with exit code 1 in 10 s: {tmp_path}/b.xml" in capsys.readouterr().out
    machine = Machine(a=(100, 124), b=(90, 0))
    assert machine.check([A, B, C], tmp_path, budget=285) == 124 and machine.ran == ["a", "b"]
    out = capsys.readouterr().out
    assert "gpu_check: a: not finished in 100 s" in out and "c: not started: no time left" in out
    assert machine.commands[0].startswith("timeout --signal=INT --kill-after=18 100 ")
    assert Machine().check([A, B, C], tmp_path, budget=300) == 0


def test_a_warm_up_and_a_part_without_a_chosen_test_do_not_decide(tmp_path):
    machine = Machine(**{"warm-up": (300, 1), "b": (1, 5)})
    assert machine.check([WARM_UP, A, B], tmp_path, options=["-k", "none"]) == 0 and machine.ran == ["warm-up", "a", "b"]


def test_results_go_to_a_new_folder_and_caches_to_one_folder_unless_the_user_says_otherwise(tmp_path):
    for end in ("", "-2", "-3"):
        folder = find_unused_folder(tmp_path, "NVIDIA H100 80GB HBM3", "2026-11-23")
        folder.mkdir()
        assert folder.name == "h100-80gb-hbm3-2026-11-23" + end
    environment = gpu_parts.fill_environment(tmp_path, {"TRITON_CACHE_DIR": "/mine", "PATH": "/bin"})
    assert environment["TRITON_CACHE_DIR"] == "/mine" and environment["PATH"] == "/bin"
    assert environment["DG_JIT_CACHE_DIR"] == environment["SGLANG_DG_CACHE_DIR"] == str(tmp_path / "deep_gemm")


def test_the_script_lists_its_parts_and_refuses_without_a_gpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SGLANG_CACHE_DIR", str(tmp_path))
    assert gpu_parts.main(["--list", "--quick"], "H100") == 0
    assert capsys.readouterr().out.split()[:2] == ["kernels", "170"]
    monkeypatch.setenv("OUT", str(tmp_path / "out"))  # a common name, which may mean something else
    results = tmp_path / "results"
    assert gpu_parts.main(["layers", f"--results={results}", "--", "-k", "x"], "H100", lambda command, environment: 0) == 0
    assert len(list(results.iterdir())) == 1 and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as refused:
        gpu_parts.main(["no-such"], "H100")
    assert refused.value.code == 2
    (with_gpu := tmp_path / "python").write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo "NVIDIA H100" || exec {sys.executable} "$@"\n')
    with_gpu.chmod(0o755)
    script, environment = ["bash", str(ROOT / "tools" / "gpu_check.sh")], {"PATH": "/usr/bin:/bin", "SGLANG_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([*script, "--list", "speed-sync"], env=environment | {"PYTHON": str(with_gpu)}, capture_output=True, text=True)
    assert done.returncode == 0 and [line.split()[0] for line in done.stdout.splitlines()] == ["warm-up", "speed-sync"], done.stderr
    done = subprocess.run(script, env=environment | {"PYTHON": "/bin/false"}, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("gpu_check: no NVIDIA GPU")
