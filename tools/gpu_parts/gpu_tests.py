"""Part `gpu_tests`: pytest's tests marked `gpu`, one row for each that failed and one that counts all."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gpu_parts.rows import Rows, run_part

ROOT = Path(__file__).parents[2]


def part(rows: Rows) -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        tell(rows, report.read_text() if report.exists() else "", code)


def tell(rows: Rows, report: str, code: int) -> None:
    """Reads pytest's JUnit report; `code` is its exit code."""
    cases = list(ElementTree.fromstring(report).iter("testcase")) if report else []
    kinds: dict[str, list[ElementTree.Element]] = {kind: [] for kind in ("failure", "error", "skipped")}
    for case in cases:
        for kind, held in kinds.items():
            held += case.findall(kind)
            if kind != "skipped" and case.find(kind) is not None:
                message = (case.find(kind).get("message") or "").splitlines()  # type: ignore[union-attr]
                rows.add(f"{case.get('classname')}::{case.get('name')}", message[0][:300] if message else kind, ok=False)
    bad = len(kinds["failure"]) + len(kinds["error"])
    told = f"{len(cases) - bad - len(kinds['skipped'])} passed, {bad} failed, {len(kinds['skipped'])} skipped; exit code {code}"
    rows.add("pytest -m gpu tests/gpu", told, code == 0, passed=len(cases) - bad - len(kinds["skipped"]), failed=bad)
    for reason in sorted({element.get("message") or "" for element in kinds["skipped"]}):
        rows.add("skipped", reason)


if __name__ == "__main__":
    run_part(part)
