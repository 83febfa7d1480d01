"""A mistake that only rank 0 checks ends all ranks with the same message and exit code, so that no batch job starts again.

The model is on a hub, which the ranks ask once before they have a process group.
"""

import os
import subprocess
import sys

from support.fake_hub import serve_hub
from support.models import make_checkpoint
from support.processes import ROOT, free_port

RUN = """
model.path = "hf:someone/unknown"
log.dir = "runs"
data = {train = "no.jsonl", eval = "", format = "gsm8k"}
rollout.max_new_tokens = 16
train.layout.dp = 2
"""


def test_a_file_that_rank_0_misses_ends_all_ranks_with_exit_code_2(tmp_path):
    make_checkpoint(tmp_path / "model")
    (tmp_path / "run.toml").write_text(RUN)
    cache = {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
    launch = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "megatron_rl", "train", "run.toml"]
    with serve_hub() as hub:
        hub.add("someone/unknown", tmp_path / "model")
        environment = {**os.environ, **launch, **cache, "HF_ENDPOINT": hub.url}
        ranks = [
            subprocess.Popen(
                command, cwd=tmp_path, env={**environment, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True
            )
            for rank in "01"
        ]
        for process, name in zip(ranks, ("megatron-rl", "megatron-rl [rank 1]"), strict=True):
            _, errors = process.communicate(timeout=600)
            assert process.returncode == 2 and errors.startswith(f"{name}: data.train = 'no.jsonl': does not exist; "), errors
    assert not (tmp_path / "runs").exists()
    assert hub.requests.count("GET /api/models/someone/unknown/revision/main") == 1
    assert sorted(hub.downloads) == ["config.json", "tokenizer.json", "tokenizer_config.json"]  # the mistake is found without weights
