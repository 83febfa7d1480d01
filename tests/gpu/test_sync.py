"""The sync of an 8B model by CUDA IPC to another process on the same GPU, against a copy within the device, and the share of the proof in
it. tools/weight_sync.py measures."""

import json

from support.processes import run_tool

ON_GPU = ["--model=8b", "--device=cuda", "--transports=cuda_ipc", "--bucket-mb=256,64,16", "--repeat=3"]
"""A chunk is half a bucket: the smallest one's chunks stay in the GPU's cache between writer and reader, and are many."""
ON_CPU = ["--model=tiny", "--transports=shared_memory", "--bucket-mb=8,4", "--repeat=1"]


def test_speed_of_the_sync(device, figures, tmp_path):
    options = [*(ON_GPU if device == "cuda" else ON_CPU), "--train=tp=1", f"--json={tmp_path / 'report.json'}"]
    done = figures.measure(run_tool, ("weight_sync", *options))
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["ratios"]) == (3 if device == "cuda" else 2)
    for case, values in report["cases"].items():
        figures.add(f"sync, {case}", **values)
    for setting, ratios in report["ratios"].items():
        of_copy = ratios["of plain copy in one process"]
        figures.add(f"sync, {setting}: without its proof, of a copy's speed", target="sync", reached=of_copy)
        figures.add(f"sync, {setting}: ratios", **ratios)
        assert of_copy > 0 and ratios["proof's share if nothing is sampled meanwhile"] < 1
