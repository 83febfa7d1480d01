"""tools/rollout_data.py runs, writes its report, and refuses bad input."""

import json

import pytest
from support.processes import run_tool


@pytest.mark.long
def test_columns_are_read_for_less_than_json_and_every_replica_gets_its_bytes(tmp_path):
    done = run_tool(
        "rollout_data", "--tokens=4000", "--replicas=2", "--planned=4", "--experts=3x2", "--repeat=1", "--json", tmp_path / "report.json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    costs, shares, alone = report["answers"], report["share"]["2"], report["rank 0"]["4"]
    assert costs["bytes left"] < costs["bytes columns"] < 8 + 3 * 2 + 1 < costs["bytes JSON"]
    assert costs["read columns"] < costs["read JSON"] and alone["at the engines"] < alone["through rank 0"]
    assert [each["bytes"] for way in shares.values() for each in way] == [pytest.approx(8 + 3 * 2, rel=0.01)] * 4


def test_bad_input_is_one_line():
    done = run_tool("rollout_data", "--experts", "48")
    assert done.returncode == 2 and done.stderr.startswith("megatron-rl: --experts = '48': must be like 48x8"), done.stderr
