"""Rehearses configurations of the project, with the command that users call or as selected trainer ranks in one process.

python -m support.shipped CONFIG,GPU,RANKS[,--FIELD=VALUE]...   prints one JSON object of configuration -> ranks' reports
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def few_layers(model, folder, **changes):
    """Write the config.json of two layers of a shipped model, with `changes` to its fields. Return its folder."""
    fields = json.loads((ROOT / "configs" / "models" / model / "config.json").read_text()) | {"num_hidden_layers": 2} | changes
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def rehearse_shipped(name, folder, *options):
    """Return the `--json` report of a rehearsal that must pass."""
    run_module("megatron_rl", "rehearse", f"configs/{name}.toml", "--json", str(folder / "found.json"), *options)
    return json.loads((folder / "found.json").read_text())


def rehearse_trainers(*jobs):
    """Return the reports that `main` prints."""
    return json.loads(run_module("support.shipped", *jobs).splitlines()[-1])


def check_aims(rank):
    """Check that phases move less than 1.5 times the least element-wise bytes, and expose less than 25 % of their bound."""
    for phase in rank["phases"]:
        if bound := phase["bound"]:
            assert 1 < bound["elementwise_bytes"] / phase["least_elementwise_bytes"] < 1.5, phase["phase"]
    check_exposed(rank)


def check_exposed(rank):
    """Check that phases expose less than 25 % of their bound."""
    for phase in rank["phases"]:
        if bound := phase["bound"]:
            assert bound["seconds"]["exposed communication"] < 0.25 * bound["total_seconds"], phase["phase"]


def run_module(*command, path=""):
    """Return the output of `python -m COMMAND` in a process of its own, because a rehearsal must start before torch is imported."""
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler, which a rehearsal needs")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [path])])}
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def rehearse_ranks(config, model, cluster, ranks=None):
    """Return the reports of trainer ranks, by default of all that differ. Call it after `install_device`."""
    from megatron_rl.cli.rehearse import choose_ranks
    from megatron_rl.cost.workload import Workload
    from megatron_rl.rehearsal.job import rehearse_rank
    from megatron_rl.rehearsal.report import make_report

    job = Workload.from_config(config, model)
    numbers = choose_ranks(ranks, job, config.train.layout.to_layout())
    return [make_report(rehearse_rank(config, rank, cluster.gpu), job, cluster).as_json() for rank in numbers]


def main(jobs):
    from megatron_rl.cli.rehearse import install_device

    install_device()
    from megatron_rl.config import load_config
    from megatron_rl.cost.hardware import Cluster
    from megatron_rl.hf.files import read_config

    found = {}
    for name, gpu, ranks, *overrides in (job.split(",") for job in jobs):
        config = load_config(ROOT / "configs" / f"{name}.toml", overrides)
        found[name] = rehearse_ranks(config, read_config(config.model.folder), Cluster.from_options(16, 8, gpu), ranks)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
