"""tools/gpu_check.py without a GPU: what it finds and lists, how parts end, and the pages it writes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gpu_check
import psutil
import pytest
import torch
from gpu_parts import found, outcome, table
from gpu_parts.outcome import Outcome
from gpu_parts.parts import PARTS, TOTAL_SECONDS, Part
from gpu_parts.rows import Row
from support.gpu_machine import H200

ROOT = Path(__file__).resolve().parents[3]
ABOUT = {"date": "2026-11-21", "commit": "abc1234", "seconds": 61.2}
WRITES = (
    "import sys, pathlib; from gpu_parts.rows import Rows; rows = Rows(pathlib.Path(sys.argv[2])); rows.add('first', 'fine', ok=True); "
)


def part(name: str, seconds: int = 30) -> Part:
    return Part(name, f"the part {name}", seconds, ())


def run(name: str, folder: Path, code: str, seconds: float = 30.0) -> Outcome:
    return outcome.run(part(name), folder, seconds, (), [sys.executable, "-c", code])


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tools'}")


def test_this_machine_is_found():
    machine = found.find()
    assert machine.packages["sglang"] == "0.5.23"
    assert machine.packages["torch"] == torch.__version__
    if not torch.cuda.is_available():
        assert machine.gpu is None and "torch" in machine.why_no_gpu
        assert machine.lacks(("gpu", "hopper", "sglang")) == ["gpu", "hopper"]


def test_wants_are_all_known():
    for each in PARTS:
        assert H200.lacks((*each.needs, *each.uses)) == []
        assert all(found.fix(want) for want in each.needs)
    assert not replace(H200, capability=(10, 0)).has("hopper")


def test_all_parts_exist_and_those_that_check_come_first():
    """All of these have their whole time, whatever happens to the others; `test_no_part_stops_the_others` holds the whole to its limit."""
    assert all((ROOT / "tools" / "gpu_parts" / f"{each.name}.py").is_file() for each in PARTS)
    assert [each.name for each in PARTS[:5]] == ["quantisers", "products", "layer", "bridge", "quickstart"]
    assert sum(each.seconds for each in PARTS[:5]) < TOTAL_SECONDS and TOTAL_SECONDS + 2 * outcome.GRACE < 9 * 60


def test_without_a_gpu_it_says_so_in_one_line():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    script = ["bash", str(ROOT / "tools" / "gpu_check.sh")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not done.stdout
    assert done.stderr.startswith("gpu_check: no NVIDIA GPU here, torch 2.") and "--dry-run" in done.stderr


def test_dry_run_lists_parts_and_what_they_lack():
    machine = replace(H200, packages=H200.packages | {"deep_gemm": None, "sglang": None})
    lines = gpu_check.plan(machine, PARTS)
    assert lines[0] == f"NVIDIA H200, driver 580.1; at most {TOTAL_SECONDS} s in all"
    at = next(number for number, line in enumerate(lines) if line.startswith("products: "))
    assert lines[at].endswith("would run") and lines[at + 1] == "    would use deep_gemm, sglang"
    at = next(number for number, line in enumerate(lines) if line.startswith("bridge: "))
    assert lines[at].endswith("would be left out") and lines[at + 1] == "    needs sglang"
    assert lines[-2:] == [f"{name} is missing: bash launch/install_gpu.sh" for name in ("deep_gemm", "sglang")]


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        gpu_check.main(["--only", "products,speed"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("gpu_check: --only = 'speed': is none of quantisers, products, ")


def test_how_parts_end(tmp_path):
    fine = run("fine", tmp_path, WRITES)
    assert (fine.status, fine.why, fine.log, fine.rows) == ("passed", "", "", [Row("first", "fine", True)])
    wrong = run("wrong", tmp_path, WRITES + "rows.add('second', '3 bytes differ', ok=False)")
    assert (wrong.status, wrong.why) == ("failed", "1 of 2 rows are not as they must be; first: second")
    crashed = run("crashed", tmp_path, WRITES + "raise OSError('no driver')")
    assert (crashed.status, crashed.why) == ("failed", "its process ended with 1")
    assert crashed.log.endswith("OSError: no driver") and len(crashed.rows) == 1
    assert run("silent", tmp_path, "").why == "it found nothing"


def test_a_part_that_hangs_is_ended_with_what_it_started(tmp_path):
    child = "import subprocess, time; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); time.sleep(60)"
    hung = run("hung", tmp_path, WRITES + child, seconds=4.0)
    assert (hung.status, hung.why) == ("timed out", "ended after 4 s; 1 rows were found until then")
    assert hung.seconds < 12
    pid = hung.log.splitlines()[1]
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "what a part started outlives it"
        time.sleep(0.05)


def test_no_part_stops_the_others(monkeypatch, tmp_path):
    ended = {"a": "failed", "b": "timed out", "c": "passed"}
    monkeypatch.setattr(outcome, "run", lambda part, folder, seconds, missing: Outcome(part.name, part.title, ended[part.name], seconds))
    parts = [part("a"), part("b"), replace(part("d"), needs=("nvcc",)), part("c", seconds=90)]
    found = gpu_check.run_all(replace(H200, nvcc=None), parts, deadline=gpu_check.time.monotonic() + 60)
    assert [each.status for each in found] == ["failed", "timed out", "left out", "passed"]
    assert found[2].why == "needs nvcc (install the CUDA toolkit, 12.9 or newer, and set CUDA_HOME)"
    assert found[0].seconds == 30 and 50 < found[3].seconds <= 60  # what is left, not its own limit
    late = gpu_check.run_all(H200, [part("c")], deadline=gpu_check.time.monotonic() + 1)
    assert late[0].status == "left out" and "are over" in late[0].why


def test_interrupting_leaves_out_the_rest(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(outcome, "run", interrupted)
    found = gpu_check.run_all(H200, [part("a"), part("b")], deadline=gpu_check.time.monotonic() + 60)
    assert [(each.status, each.why) for each in found] == [("left out", "interrupted")] * 2


BEATEN = {"target": "actor update", "reached": 1.6, "to_beat": 1.54}
OUTCOMES = [
    Outcome("a", "bytes", "passed", 3.4, missing=["deep_gemm"], rows=[Row("rows", "the same 12 values, bit by bit", True, {"differ": 0})]),
    Outcome("c", "steps", "passed", 3.0, rows=[Row("step, fp8", "2 ms", None, BEATEN)]),
    Outcome("b", "speed", "failed", 2.0, "its process ended with 1", rows=[Row("x | y", "2 ms", None)], log="Traceback\nOSError: no"),
]


def test_results_are_written_and_never_over_older_ones(tmp_path):
    page = table.write(tmp_path, H200, OUTCOMES, ABOUT)
    assert page.name == "h200-2026-11-21.md"
    told = json.loads(page.with_suffix(".json").read_text())
    assert (told["commit"], told["machine"]["gpu"]) == ("abc1234", "NVIDIA H200")
    assert told["parts"][0]["rows"] == [{"what": "rows", "found": "the same 12 values, bit by bit", "ok": True, "numbers": {"differ": 0}}]
    assert table.write(tmp_path, H200, OUTCOMES, ABOUT).name == "h200-2026-11-21-2.md"
    text = page.read_text()
    assert "| bytes | passed | 3 | 1 | without deep_gemm |" in text and "| x \\| y |  | 2 ms |" in text and "    OSError: no" in text
    assert "| actor update | step, fp8 | 1.60 | 1.54 | met |" in text
    assert "| rows | ok | the same 12 values, bit by bit |" in text


def test_names_of_files():
    assert table.file_name("NVIDIA H100 80GB HBM3", "2026-11-21") == "h100-80gb-hbm3-2026-11-21"
    assert table.file_name("", "2026-11-21") == "gpu-2026-11-21"


def test_the_summary_names_what_is_missing():
    lines = gpu_check.summary(OUTCOMES)
    assert lines == [
        "failed: speed: its process ended with 1",
        "rows left out without deep_gemm: bash launch/install_gpu.sh",
        "actor update: 1.60 (step, fp8); to beat 1.54: met",
        "2 of 3 parts passed",
    ]
