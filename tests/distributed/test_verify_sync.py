"""tools/verify_sync.py as a user runs it, and its dump as other code reads it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from support.geometries import hybrid_config
from support.processes import ROOT, run_tool

QWEN3 = {"model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
QWEN3 |= {"head_dim": 128, "intermediate_size": 512, "vocab_size": 100}


def run(folder, config, *options):
    (folder / "config.json").write_text(json.dumps(config))
    return run_tool("verify_sync", "--hf-config", folder, *options)


@pytest.mark.long
def test_pipeline_and_tensor_parallel_to_tensor_parallel(tmp_path):
    outputs = ["--dump", f"{tmp_path}/dump", "--json", f"{tmp_path}/v.json"]
    done = run(tmp_path, QWEN3, "--train", "tp=2,pp=2", "--rollout", "tp=2", "--layers", "2", *outputs)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "v.json").read_text())
    assert report["differences"] == [] and report["blocks"] > 0 and 0 < report["bytes_across_ranks"] < report["bytes_moved"]
    source, rank1 = load_file(tmp_path / "dump" / "hf.safetensors"), load_file(tmp_path / "dump" / "rollout_rank1.safetensors")
    down = source["model.layers.1.mlp.down_proj.weight"][128:256, 256:384].float()  # a block that rank 1 holds in its first columns
    scale = 2.0 ** torch.ceil(torch.log2(down.abs().max() / 448))
    assert rank1["model.layers.1.mlp.down_proj.weight_scale_inv"][1, 0] == scale
    held = rank1["model.layers.1.mlp.down_proj.weight"][128:256, :128]
    assert torch.equal(held.view(torch.uint8), (down / scale).to(torch.float8_e4m3fn).view(torch.uint8))


MOE = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.mark.long
@pytest.mark.parametrize(
    "changes, options",
    [
        (MOE, ["tp=1,ep=2,dp=2", "--scale-format", "fp32"]),
        ({"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4}, ["tp=2"]),
    ],
)
def test_experts_and_narrow_heads_to_one_engine_rank(tmp_path, changes, options):
    done = run(tmp_path, QWEN3 | changes, "--layers", "1", "--train", *options)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_fewer_layers_of_a_wrapper_whose_config_lists_its_layers(tmp_path):
    widths = {"head_dim": 128, "intermediate_size": 256, "vocab_size": 100, "linear_num_key_heads": 4}
    done = run(tmp_path, hybrid_config("qwen3_5", 8, 256, 4, 2, 8, **widths), "--layers", "4", "--train", "tp=2", "--rollout", "tp=2")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "config, options, words",
    [
        (QWEN3, ["--train", "tp=3"], ["layout.tp = 3", "4"]),
        pytest.param(QWEN3, ["--train", "mp=3"], ["--train", "tp, pp, vpp"], marks=pytest.mark.long),
        pytest.param(QWEN3 | {"model_type": "mamba"}, [], ["mamba"], marks=pytest.mark.long),
        pytest.param(QWEN3 | {"intermediate_size": 384}, ["--rollout", "tp=2"], ["gate", "192"], marks=pytest.mark.long),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, config, options, words):
    done = run(tmp_path, config, *options)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("megatron-rl: ")
    for word in words:
        assert word in done.stderr


WORK = """
import sys, time
sys.path.insert(0, sys.argv[1])
import harness

def work(rank):
    print("started", flush=True)
    kind, seconds = sys.argv[2], float(sys.argv[3])
    end = time.process_time() + seconds
    while kind == "compute" and time.process_time() < end:
        pass
    time.sleep(seconds if kind == "wait" else 0)
    return "done"

if __name__ == "__main__":
    harness._IDLE_SECONDS = 3
    print(harness.run_on_ranks(work, 1), flush=True)
"""


@pytest.mark.long
@pytest.mark.parametrize("kind, seconds, paused, result", [("compute", 6, 0, "done"), ("wait", 2, 6, "done"), ("wait", 60, 0, "RunError")])
def test_only_ranks_that_compute_nothing_are_ended(tmp_path, kind, seconds, paused, result):
    (tmp_path / "work.py").write_text(WORK)
    command = [sys.executable, str(tmp_path / "work.py"), str(ROOT / "tools"), kind, str(seconds)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
    ) as process:
        assert process.stdout is not None and "started" in process.stdout.readline()
        if paused:
            os.killpg(process.pid, signal.SIGSTOP)
            time.sleep(paused)
            os.killpg(process.pid, signal.SIGCONT)
        assert result in process.stdout.read()
