"""Random checkpoints are written file by file, with the same weights for any size of a file. Ranks that hang are ended."""

import os
import signal
import subprocess
import sys
import time

import pytest
from harness import write_random_checkpoint
from safetensors.torch import load_file
from support.families import ARCHITECTURES, CLASSES
from support.processes import ROOT


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_files_hold_the_same_weights_whatever_their_size(family, tmp_path):
    """The parts of a stack, such as gpt-oss's experts, are one tensor of one file."""
    found = {}
    for name, size in (("one", 1 << 30), ("many", 1)):
        (folder := tmp_path / name).mkdir()
        write_random_checkpoint(folder, ARCHITECTURES[family] | {"architectures": [CLASSES[family]]}, file_bytes=size)
        files = sorted(folder.glob("*.safetensors"))
        found[name] = {key: tensor for file in files for key, tensor in load_file(file).items()}
        assert len(files) == (1 if name == "one" else len(found[name]))
    assert found["one"].keys() == found["many"].keys()
    assert all(tensor.equal(found["many"][key]) for key, tensor in found["one"].items())
    assert len({tensor.float().std().item() for tensor in found["one"].values()}) > 3, "random"


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
