"""The sockets of a real run against the table of docs/guides/security.md."""

import re
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from support.listening import find_listening
from support.processes import ROOT, family
from support.train_command import LONG, TORCHRUN, train

pytestmark = pytest.mark.timeout(3000)
PAGE = ROOT / "docs" / "guides" / "security.md"
PROCESSES = {
    "torch.distributed.run": "torchrun",
    "rollout_sglang.server": "engine",
    "sglang::": "engine",
    "megatron_rl train": "trainer rank",
}
CHANGES = {"train.layout.dp": 2, "train.steps": 1}


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
        time.sleep(0.1)
    return set(found.values())


def test_the_page_lists_the_sockets_of_a_run_of_two_ranks_with_agents(tmp_path):
    with train(tmp_path, CHANGES, launcher=TORCHRUN, config="tool_agent") as command:
        found = watch(command)
        done = command.wait(LONG)
    assert done.code == 0, done.err
    here = {row for row in read_table() if row[0] != "rank 0 without torchrun"}  # `test_distributed` has its store
    listed = {("trainer rank" if process == "rank 0" else process, address) for process, address in here}
    assert found == listed, f"not on the page: {found - listed}; only on the page: {listed - found}"
    assert len(here) == 6
