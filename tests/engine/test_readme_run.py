"""The README's own reward and own loss train together, found from the folder where torchrun starts two ranks."""

import os
import subprocess
import sys

import pytest
from support.processes import ROOT, one_thread_environment
from support.readme import read_train_blocks, write_own_code
from support.train_command import LONG, TINY, TORCHRUN, latest, make_model, read_rows

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]


def test_two_ranks_and_their_engine_find_the_users_code_in_the_working_directory(tmp_path):
    write_own_code(tmp_path)
    (command,) = [words for words in map(str.split, read_train_blocks()["laptop"]) if "train" in words]
    options = dict(word.removeprefix("--").split("=", 1) for word in command if word.startswith("--"))
    settings = {**TINY, **options, "algorithm.loss": "my_loss:token_losses", "train.layout.tp": 2}
    settings |= {"model.path": tmp_path / "model", "log.dir": tmp_path / "runs"}
    arguments = ["megatron_rl", "train", *make_model(tmp_path, settings, TORCHRUN)]
    words = [sys.executable, "-m", *map(str, [*TORCHRUN, *arguments])]
    environment = {**one_thread_environment(), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = read_rows(latest(tmp_path))
    assert rows[-1]["step"] == 2 and all(0 <= row["reward/mean"] <= 1 for row in rows if "reward/mean" in row)
    assert [row["mismatch/abs_max"] for row in rows if "mismatch/abs_max" in row] == [0.0, 0.0]
    assert os.path.isfile(latest(tmp_path) / "report.html")
