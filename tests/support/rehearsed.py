"""Rehearses one job of each family and writes docs/results/rehearsed.json, with which tests compare the table of models.

python -m support.rehearsed FOLDER   keeps the reports in FOLDER and does not repeat those that lie there (12 minutes on two cores)
"""

import datetime
import json
import subprocess
import sys
from pathlib import Path

from megatron_rl.hf.files import read_config
from parallel.wrappers import unwrap
from support.rehearsals import CASES
from support.shipped import ROOT, rehearse_shipped, run_module

RECORD = ROOT / "docs" / "results" / "rehearsed.json"
SHIPPED = ("qwen3_8b", "qwen2_5_32b", "qwen3_30b_a3b", "qwen3_5_9b", "qwen3_5_35b_a3b", "qwen3_next_80b_a3b")
OTHERS = ("llama", "glm", "deepseek, fp8, deep_gemm")
"""Cases of `support.rehearsals`: small models of families without a shipped configuration, trainer ranks alone."""


def rehearse(name: str, folder: Path) -> dict:
    """Return the report of one job, and keep it in `folder`."""
    file = folder / f"{name}.json"
    if not file.exists() and name in SHIPPED:
        (folder / name).mkdir(exist_ok=True)
        file.write_text(json.dumps(rehearse_shipped(name, folder / name, "--ranks", "last")))
    elif not file.exists():
        (folder / name).mkdir(exist_ok=True)
        ranks = json.loads(run_module("support.rehearsals", str(folder / name), name).splitlines()[-1])[name]
        file.write_text(json.dumps({"trainer": ranks, "engine": []}))
    return json.loads(file.read_text())


def find_family(name: str) -> str:
    """Return the family of a job's model."""
    model = CASES[name][1] if name in OTHERS else read_config(ROOT / read_path(name))
    return unwrap(model)["model_type"]


def read_path(name: str) -> str:
    """Return `model.path` of a shipped configuration."""
    lines = (ROOT / "configs" / f"{name}.toml").read_text().splitlines()
    return next(line.split('"')[1] for line in lines if line.startswith("path = "))


def main(folder: Path) -> None:
    families = {}
    for name in (*SHIPPED, *OTHERS):
        report = rehearse(name, folder)
        families[find_family(name)] = {
            "job": f"configs/{name}.toml" if name in SHIPPED else f"tests/support/rehearsals.py, case {name!r}",
            "gpu": "h100",
            "trainer_ranks": [rank["rank"] for rank in report["trainer"]],
            "engine_ranks": [rank["rank"] for rank in report["engine"]],
            "passes": all(rank["passes"] for rank in report["trainer"]) and not any(rank["fault"] for rank in report["engine"]),
        }
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    made = {"command": "PYTHONPATH=.:tests python -m support.rehearsed FOLDER", "date": str(datetime.date.today()), "commit": commit}
    RECORD.write_text(json.dumps({**made, "families": families}, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
