"""Conditions that users' machines have: the same short run on the shipped model, started with another environment, console, or limit.

Each row of the table starts `megatron-rl train` as a user does and states how it must end. All rows together take minutes.
"""

import gzip
import json
import os
import pty
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.processes import ROOT, Command, alive_after, end, family, one_thread_environment, until
from support.train_command import LONG, TINY

pytestmark = [pytest.mark.long, pytest.mark.timeout(3000)]
SETTINGS = {name: value for name, value in TINY.items() if not name.startswith(("architecture.", "warm_start."))}
ENDLESS = {"train.steps": 500}
PORT = "http://127.0.0.1:9"
"""Nothing answers here."""


class Start(Command):
    """One start of the command. Its output goes to a file, or to a terminal whose output is collected."""

    def __init__(self, case: "Case", folder: Path) -> None:
        self.folder, self.written, self._master = folder, bytearray(), -1
        settings = {**SETTINGS, "log.dir": folder / "runs", **case.settings}
        words = ["train", str(ROOT / "configs" / "quickstart.toml"), *(f"--{name}={value}" for name, value in settings.items())]
        # A run by root goes through `sh`, in which `before` makes what needs root.
        command = f"{case.before.format(folder=shlex.quote(str(folder)))}\nexec {case.prefix} {shlex.quote(sys.executable)} -m megatron_rl "
        environment = one_thread_environment() | {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
        environment |= {name: value.format(folder=folder) for name, value in case.env.items()}
        (folder / "tmp").mkdir(parents=True)
        outputs: dict[str, Any] = {"stderr": subprocess.STDOUT}
        if case.terminal:
            self._master, terminal = pty.openpty()
            outputs = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        super().__init__(
            folder,
            args=[*case.outer, "/bin/sh", "-c", command + shlex.join(words)],
            env={name: value for name, value in environment.items() if name not in case.unset},
            umask=case.umask,
            start_new_session=True,
            **outputs,
        )
        if case.terminal:
            os.close(terminal)
            threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while part := os.read(self._master, 4096):
                self.written += part
        except OSError:
            pass  # the other side has closed

    def close_terminal(self) -> None:
        """Close the console, as a terminal's window does: what reads it goes away, and the session gets SIGHUP."""
        os.close(self._master)
        os.killpg(self.pid, signal.SIGHUP)

    def output(self) -> str:
        return bytes(self.written).decode(errors="replace") if self._master >= 0 else self._texts()[0]

    def runs(self) -> list[Path]:
        return sorted(Path(self.folder / "runs").glob("20*"))

    def wait_for_row(self) -> None:
        """Wait for the first row of the run, or for the end of the process."""
        has_row = lambda: any((run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size for run in self.runs())  # noqa: E731
        until(lambda: has_row() or self.ended(), LONG, "first row")


def signal_after_a_row(number: int) -> Callable[[Start], None]:
    def act(start: Start) -> None:
        start.wait_for_row()
        os.kill(start.pid, number)

    return act


def close_console(start: Start) -> None:
    start.wait_for_row()
    start.close_terminal()


def is_private(start: Start) -> None:
    files = [path for path in (start.folder / "runs").rglob("*") if not path.is_symlink()]
    assert files and not [path for path in files if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)]


def has_no_escapes(start: Start) -> None:
    assert "\x1b" not in start.output() and "step 2/2" in start.output()


def was_limited(start: Start) -> None:
    limits = [int(path.read_text()) for name in ("max", "limit_in_bytes") if (path := Path(GROUP, f"memory.{name}")).is_file()]
    os.rmdir(GROUP)
    assert limits == [LIMIT]


def is_gbk(start: Start) -> None:
    (start.folder / "stdout").read_bytes().decode("gbk")


@dataclass
class Case:
    name: str
    env: dict[str, str] = field(default_factory=dict)
    """Variables; `{folder}` is the test's folder."""
    unset: tuple[str, ...] = ()
    before: str = ""
    """Commands of the shell that starts the run."""
    prefix: str = ""
    """Words before the program."""
    outer: tuple[str, ...] = ()
    """Words before the shell."""
    umask: int = 0o022
    terminal: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    subfolder: str = "plain"
    act: Callable[[Start], None] = lambda _: None
    code: int = 0
    check: Callable[[Start], None] = lambda _: None
    needs: Callable[[], str] = lambda: ""
    """Return the reason to skip the row on this machine, or ""."""


def needs_mounts() -> str:
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True) if shutil.which("unshare") else None
    return "" if done is not None and done.returncode == 0 else "this machine lets nobody mount a folder read-only"


def needs_cgroup() -> str:
    folder = find_cgroups()
    return "" if folder is not None and os.access(folder, os.W_OK) else "cgroups of memory cannot be written here"


def find_cgroups() -> Path | None:
    """Return the folder in which a group with a memory limit can be made: of version 1, or of version 2 if it controls memory."""
    root = Path("/sys/fs/cgroup")
    second = root / "cgroup.subtree_control"
    if second.is_file():
        return root if "memory" in second.read_text().split() else None
    return root / "memory" if (root / "memory").is_dir() else None


def needs_streams() -> str:
    return "" if (ROOT / "megatron_rl" / "observability" / "streams.py").is_file() else "a console that closes still ends a run"


def needs_gbk() -> str:
    charmap = Path("/usr/share/i18n/charmaps/GBK.gz")
    return "" if shutil.which("localedef") and charmap.is_file() and gzip.open(charmap).read(1) else "localedef has no GBK here"


READ_ONLY = "mkdir -p {folder}/cache && mount --bind {folder}/cache {folder}/cache && mount -o remount,bind,ro {folder}/cache"
READ_ONLY_CODE = f"mount --bind {shlex.quote(str(ROOT))} {shlex.quote(str(ROOT))} && mount -o remount,bind,ro {shlex.quote(str(ROOT))}"
LIMIT = 4 << 30  # what the README says the quickstart needs
GROUP = f"{find_cgroups()}/megatron-rl-test-{os.getpid()}"
CGROUP = f"mkdir {GROUP}; for f in max limit_in_bytes; do [ ! -e {GROUP}/memory.$f ] || echo {LIMIT} >{GROUP}/memory.$f; done; echo $$ >{GROUP}/cgroup.procs"  # noqa: E501
UMLAUTS = "ein Ordner mit Ümläuten 目录"
PROXIES = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), PORT)

CASES = [
    Case("proxies", env=PROXIES, unset=("no_proxy", "NO_PROXY")),
    Case("no HOME", unset=("HOME", "USER", "LOGNAME")),
    Case("HF_HOME read-only", env={"HF_HOME": "{folder}/cache"}, before=READ_ONLY, outer=("unshare", "-m"), needs=needs_mounts),
    Case("code read-only", before=READ_ONLY_CODE, outer=("unshare", "-m"), needs=needs_mounts),
    Case("locale C and umlauts", env={"LC_ALL": "C"}, subfolder=UMLAUTS),
    Case(
        "locale GBK",
        env={"LOCPATH": "{folder}", "LC_ALL": "zh_CN.GBK"},
        before="localedef -c -i zh_CN -f GBK {folder}/zh_CN.GBK >/dev/null 2>&1",
        subfolder=os.fsdecode("目录".encode("gbk")),
        check=is_gbk,
        needs=needs_gbk,
    ),
    Case("umask 077", umask=0o077, check=is_private),
    Case("blanks and umlauts", subfolder=UMLAUTS),
    Case("dumb terminal", env={"TERM": "dumb"}, terminal=True, check=has_no_escapes),
    Case("no input or output", prefix="setsid -w", before="exec <&-"),
    Case("nohup", prefix="nohup", act=signal_after_a_row(signal.SIGHUP)),
    Case("console closes", terminal=True, settings=ENDLESS, act=close_console, code=129, needs=needs_streams),
    Case("SIGTERM", settings=ENDLESS, act=signal_after_a_row(signal.SIGTERM), code=143),
    Case("SIGUSR1", settings=ENDLESS, act=signal_after_a_row(signal.SIGUSR1), code=143),
    Case("memory limit", before=CGROUP, check=was_limited, needs=needs_cgroup),
]


@pytest.fixture
def folder():
    """A folder with a path that is short enough for an engine's Unix sockets, and that is writable by this test alone."""
    with tempfile.TemporaryDirectory(prefix="mrl", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_a_run_on_such_a_machine_ends_as_it_must(case, folder):
    if reason := case.needs():
        pytest.skip(reason)
    start = Start(case, folder / case.subfolder)
    finish(case, [start])
    assert len(start.runs()) == 1


def test_two_runs_in_one_folder_at_once_get_folders_of_their_own(folder):
    one, other = Case("one", settings={"log.dir": folder / "runs"}), Case("other", settings={"log.dir": folder / "runs"})
    starts = [Start(case, folder / case.name) for case in (one, other)]
    for start in starts:
        start.runs = lambda: sorted((folder / "runs").glob("20*"))  # type: ignore[method-assign]
    finish(one, starts)
    assert len(starts[0].runs()) == 2


def finish(case: Case, starts: list[Start]) -> None:
    """Wait for the ends, and check exit code, console, files, and that no process is left."""
    try:
        for start in starts:
            case.act(start)
        started = [process for start in starts for process in family(start.pid)]
        for start in starts:
            code = start.wait(LONG).code
            assert code == case.code, f"exit code {code}\n{start.output()}"
        assert not alive_after(started, 60)
    finally:
        for start in starts:
            end(family(start.pid))
    for start in starts:
        assert "Traceback" not in start.output()
        if not case.code:
            assert "\nresult: " in start.output().replace("\r", "") and "\nnext:   " in start.output().replace("\r", "")
        for run in start.runs():
            state = json.loads((run / "run.json").read_text())
            assert state["status"] == ("broken" if case.code else "finished"), state
            assert (run / "report.html").is_file() and list((run / "checkpoints").glob("step_*"))
        case.check(start)
