"""tools/weight_sync.py runs, writes its report, and refuses bad input."""

import json

import pytest
from support.processes import run_tool


@pytest.mark.long
def test_every_case_of_a_resharding_is_measured(tmp_path):
    options = ["--model", "tiny", "--train", "tp=2", "--rollout", "tp=2", "--repeat", "1"]
    done = run_tool("weight_sync", *options, "--json", tmp_path / "report.json")
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert {"plain copy", "proof"} < report["cases"].keys()
    for transport in ("shared_memory", "process_group", "disk"):
        fp8, bf16 = report["cases"][f"{transport} fp8"], report["cases"][f"{transport} bf16"]
        assert 0 < fp8["min"] <= fp8["seconds"] <= fp8["max"]
        assert 1.5 < bf16["bytes"] / fp8["bytes"] < 2
        assert report["ratios"][transport]["fp8 against bf16"] == pytest.approx(bf16["seconds"] / fp8["seconds"])
        assert transport in done.stdout


def test_bad_input_is_one_line():
    wrong = {
        ("--model", "7b"): "--model = '7b': must be some of tiny, 0.5gb, 32b_slice, 8b, 0.6b",
        ("--train", "tp=0"): "--train = 'tp=0': must be like tp=2; the names are tp, pp, dp",
        ("--model", "tiny", "--rollout", "tp=3"): "rollout.tp = 3: must divide num_attention_heads (8)",
    }
    for arguments, line in wrong.items():
        done = run_tool("weight_sync", *arguments)
        assert done.returncode == 2 and done.stderr.startswith(f"megatron-rl: {line}") and done.stderr.count("\n") == 1, done.stderr
