"""A run of two ranks with agents, whose engine logs at info level and whose parts repeat secrets: no file that the run writes contains one,
only its user can read the files, and its sockets are those of docs/guides/security.md."""

import json
import os
import re
import stat
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from support import leaks, train_command
from support.listening import find_listening
from support.processes import ROOT, command_lines, family

from rollout_sglang.process import API_KEY_VARIABLE

pytestmark = pytest.mark.timeout(1800)
PAGE = ROOT / "docs" / "guides" / "security.md"
PROCESSES = {
    "torch.distributed.run": "torchrun",
    "rollout_sglang.server": "engine",
    "sglang::": "engine",
    "megatron_rl train": "trainer rank",
}
SECRETS = {"WANDB_API_KEY": "wandb-0123456789abcdef", "HF_TOKEN": "hf_" + "q" * 34, "SCORER": "sesame"}


def find_server(command):
    """Return the key of a run's engine, and its address."""
    lines = command_lines(family(command.pid)).items()
    process, words = next((process, words) for process, words in lines if "rollout_sglang.server" in words)
    return process.environ()[API_KEY_VARIABLE], f"http://{words[words.index('--host') + 1]}:{words[words.index('--port') + 1]}"


def find(secret, folder):
    """Return the files that contain a secret."""
    return [str(file) for file in folder.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]


def read_table():
    """Return {(process, address)} of the page's first table of sockets."""
    table = PAGE.read_text().partition("| process | address | what |")[2].partition("\n\n")[0]
    return {tuple(cell.strip() for cell in row.split("|")[1:3]) for row in table.splitlines()[2:]}


def name_process(process):
    words = " ".join(process.cmdline())
    return next((name for text, name in PROCESSES.items() if text in words), words)


def name_address(address):
    """Return the page's word for an address."""
    if address.startswith(("127.", "::1:")):
        return "loopback"
    if address.startswith(("0.0.0.0:", ":::")):
        return "every interface"
    folder = Path(address).parents
    own = [path for path in folder if re.fullmatch(r"mrl-\w+", path.name) and path.parent == Path(tempfile.gettempdir())]
    return "private" if own and own[0].stat().st_mode & 0o777 == 0o700 else address


def watch(command):
    """Return {(process, address)} of all sockets on which a command's processes listen until it ends."""
    found = {}
    while not command.ended():
        for process in family(command.pid):
            for socket in find_listening([process.pid]):
                try:
                    found[socket] = found.get(socket) or (name_process(process), name_address(socket.address))
                except (psutil.Error, FileNotFoundError):
                    continue  # it ends, and so does its folder
        time.sleep(0.2)
    return set(found.values())


@pytest.mark.long
def test_no_file_of_a_run_contains_a_secret_and_the_page_lists_its_sockets(tmp_path, monkeypatch):
    keys, folder = tmp_path / "keys", tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    for name, value in {**SECRETS, leaks.KEYS_FILE: str(keys), "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, value)
    with leaks.reward_server() as url, ThreadPoolExecutor(1) as pool:
        changes = {
            "train.layout.dp": 2,
            "agent.name": "support.leaks:repeat_key",
            "reward.function": '""',
            "reward.functions": f'[{{name = "http", url = "{url}", token_env = "SCORER", batch_size = 1}}]',
            "reward.max_error_share": 1.0,
            "rollout.sglang": '{log_level = "info", log_requests = true, log_requests_level = 3}',
            "log.trackers": '["tensorboard", "support.leaks:Tracker"]',
            "log.samples": 8,
            "checkpoint.every": 1,
        }
        with train_command.train(folder, changes, launcher=train_command.TORCHRUN, config="tool_agent") as command:
            watching = pool.submit(watch, command)
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
    here = {row for row in read_table() if row[0] != "rank 0 without torchrun"}  # `test_distributed` has its store
    listed = {("trainer rank" if process == "rank 0" else process, address) for process, address in here}
    found = watching.result()
    assert found == listed, f"not on the page: {found - listed}; only on the page: {listed - found}"
    assert len(here) == 6
