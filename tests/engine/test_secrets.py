"""A run whose engine logs at info level and whose parts repeat secrets: no file that the run writes contains one, and only its user can
read the files."""

import json
import os
import re
import stat
from pathlib import Path

import httpx
import pytest
from support import leaks, train_command
from support.processes import command_lines, family

from rollout_sglang.process import API_KEY_VARIABLE

pytestmark = pytest.mark.timeout(1800)
SECRETS = {"WANDB_API_KEY": "wandb-0123456789abcdef", "HF_TOKEN": "hf_" + "q" * 34, "SCORER": "sesame"}


def find_server(command):
    """Return the key of a run's engine, and its address."""
    lines = command_lines(family(command.pid)).items()
    process, words = next((process, words) for process, words in lines if "rollout_sglang.server" in words)
    return process.environ()[API_KEY_VARIABLE], f"http://{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}"


def find(secret, folder):
    """Return the files that contain a secret."""
    return [str(file) for file in folder.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]


def test_no_file_of_a_run_contains_a_secret(tmp_path, monkeypatch):
    keys, folder = tmp_path / "keys", tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    for name, value in {**SECRETS, leaks.KEYS_FILE: str(keys), "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    with leaks.reward_server() as url:
        changes = {
            "agent.name": "support.leaks:repeat_key",
            "reward.function": '""',
            "reward.functions": f'[{{name = "http", url = "{url}", token_env = "SCORER", batch_size = 1}}]',
            "reward.max_error_share": 1.0,
            "rollout.sglang": '{log_level = "info", log_requests = true, log_requests_level = 3}',
            "log.trackers": '["tensorboard", "support.leaks:Tracker"]',
            "log.samples": 8,
            "checkpoint.every": 1,
        }
        with train_command.train(folder, changes, config="tool_agent") as command:
            train_command.wait_for_rows(command, folder, 1)
            key, address = find_server(command)
            headers = {"Authorization": f"Bearer {key}"}
            refused = [httpx.get(f"{address}/server_info", headers=each).status_code for each in ({}, {"Authorization": "Bearer no"})]
            info = httpx.get(f"{address}/server_info", headers=headers, timeout=60)
            done = command.wait(train_command.LONG)
    assert done.code == 0, done.err
    assert refused == [401, 401] and info.status_code == 200 and key not in info.text
    run = train_command.latest(folder).resolve()
    log, samples = (run / "engine.log").read_text(), train_command.read_rows(run, "samples.jsonl")
    assert "server_args=" in log and "'api_key': None" in log, "SGLang prints its arguments"
    assert any("***" in str(row["error"]) for row in samples), samples[:2]
    assert "no access with ***" in (run / "run.log").read_text()
    agent_keys = keys.read_text().split()
    assert len(agent_keys) > 8 and all(re.fullmatch(r"mrl-[0-9a-f]{32}", each) for each in agent_keys)
    assert {secret: found for secret in [key, *SECRETS.values(), *agent_keys] if (found := find(secret, folder))} == {}
    assert json.loads((run / "tracked.json").read_text())["reward"]["functions"][0]["token_env"] == "SCORER"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (run, run / "engine.log")] == [0o700, 0o600]
