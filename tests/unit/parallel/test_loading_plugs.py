"""The loader of all plugs: whatever a module does while it is imported becomes one line that names the field and the plug, and exit code 2.
Signals that end a command still do."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl import plugs
from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import find_engine_launcher
from parallel import plug, user_code
from parallel.plug import InputError, Plug
from parallel.transport import TRANSPORTS, load_transport

NUMBERS = itertools.count()  # each module has a name of its own, since a module is imported once
ROOT = Path(__file__).parents[3]
KINDS = {
    plug.field: plug
    for plug in (
        *(plugs.LOSSES, plugs.ADVANTAGES, plugs.REWARDS, plugs.ENVIRONMENTS, plugs.AGENTS),
        *(plugs.DATA_SOURCES, plugs.DATA_FORMATS, plugs.TRACKERS, TRANSPORTS),
    )
}
MODULES = {
    "sys.exit(0)": ("import sys; sys.exit(0)", "SystemExit: 0"),
    "exit()": ("raise SystemExit", "SystemExit"),
    "argparse": ("import argparse\np = argparse.ArgumentParser()\np.add_argument('--a', required=True)\np.parse_args([])", "SystemExit: 2"),
    "KeyboardInterrupt": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "GeneratorExit": ("raise GeneratorExit", "GeneratorExit"),
    "own BaseException": ("class Odd(BaseException): pass\nraise Odd('a\\nb')", "Odd: a b"),
    "unprintable": ("class E(Exception):\n def __str__(self): raise KeyError\nraise E", "E: its message cannot be written"),
    "long message": ("raise ValueError('x' * 10**7)", "ValueError: xxx"),
    "os._exit(0)": ("import os; os._exit(0)", "os._exit(0)"),
    "from os import _exit": ("from os import _exit\n_exit(0)", "os._exit(0)"),
    "sleep": ("import time; time.sleep(1000)", "it did not end within 0.5 s"),
    "endless loop": ("while True: pass", "it did not end within 0.5 s"),
    "endless loop, except Exception": (
        "while True:\n try:\n  import time; time.sleep(1000)\n except Exception: pass",
        "it did not end within 0.5 s",
    ),
    "waits for a lock": ("import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", "it did not end within 0.5 s"),
    "waits for a program": ("import subprocess; subprocess.run(['sleep', '1000'])", "it did not end within 0.5 s"),
    "backtracks": ("import re; re.match('(a+)+$', 'a' * 60 + 'b')", "it did not end within 0.5 s"),
    "its __getattr__ ends the process": ("def __getattr__(name): raise SystemExit(0)", "SystemExit: 0"),
    "syntax": ("def f(:", "SyntaxError"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "not UTF-8": ("x = '\udcff'", "SyntaxError"),
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(plug, "IMPORT_SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def _write(text):
        name = f"loaded_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(text, errors="surrogateescape")
        return f"{name}:thing"

    return _write


@pytest.mark.parametrize("case", MODULES)
def test_whatever_a_module_does_is_one_line(case, write, capfd):
    text, says = MODULES[case]
    with pytest.raises(InputError) as caught:
        Plug("section.field", {}).load(name := write(text))
    assert str(caught.value).startswith(f"section.field = {name}: cannot be imported ({says}")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 900


@pytest.mark.parametrize("field", KINDS)
def test_every_kind_of_plug_is_loaded_by_the_same_loader(field, write):
    for text, says in (MODULES["sys.exit(0)"], MODULES["KeyboardInterrupt"], MODULES["sleep"]):
        with pytest.raises(InputError) as caught:
            (load_transport if field == "sync.transport" else KINDS[field].load)(name := write(text))
        assert str(caught.value).startswith(f"{field} = {name}: cannot be imported ({says}")


def test_a_module_that_forks_or_prints_is_loaded_in_this_process_alone(write):
    pid = os.getpid()
    module = "import os, sys\nchild = os.fork()\nsys.stderr.write('x' * 10)\nthing = child"
    child = Plug("section.field", {}).load(write(module))
    assert os.getpid() == pid and child > 0
    os.waitpid(child, 0)


def test_a_hostile_signature_is_refused(write):
    text = "class Thing:\n @property\n def __signature__(self): raise SystemExit(0)\n def __call__(self): pass\nthing = Thing()"
    with pytest.raises(InputError, match=r"has no readable signature \(SystemExit: 0\)"):
        Plug("section.field", {}, takes=("a",)).load(write(text))


def test_a_transport_of_the_wrong_kind_is_refused(monkeypatch):
    for name, rule in (("os:path", "must be a parallel.transport"), ("support.misbehaving_transport:WRONG_ERRORS", "its lost_errors must")):
        with pytest.raises(InputError, match=f"sync.transport = {name}: {rule}"):
            load_transport(name)


def test_an_engines_package_is_loaded_like_a_plug(write, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_rl.rollout.engine.IMPORT_SECONDS", 0.5)
    for number, case in enumerate(("sys.exit(0)", "sleep", "os._exit(0)", "syntax")):
        module, says = write(MODULES[case][0]).partition(":")[0], MODULES[case][1]
        info = tmp_path / f"own_{number}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: own_{number}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[megatron_rl.rollout]\nown_{number} = {module}:launch\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(UserError) as caught:
            find_engine_launcher(f"own_{number}")
        assert str(caught.value).startswith(f"rollout.engine = 'own_{number}': cannot be imported ({says}")


def start(tmp_path, module, *, limit=60.0):
    """Start the checks of a configuration whose tracker's module is given, in a process, as the command line does."""
    (tmp_path / "own_tracker.py").write_text(module)
    script = f"""
from megatron_rl.cli.main import expected_errors, no_other_exit
from megatron_rl.errors import as_user_error
from megatron_rl.plugs import TRACKERS
from parallel import plug, user_code
plug.IMPORT_SECONDS, user_code._AGAIN_SECONDS = {limit}, 0.05
print("begins", flush=True)
with expected_errors(), no_other_exit(), as_user_error():
    TRACKERS.load("own_tracker:Tracker")
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout.readline() == "begins\n"
    return command


def test_exit_codes_and_lines_of_a_command(tmp_path):
    line = "megatron-rl: log.trackers = 'own_tracker:Tracker': cannot be imported (SystemExit: 0); use one of tensorboard"
    command = start(tmp_path, MODULES["sys.exit(0)"][0])
    _, err = command.communicate(timeout=300)
    assert command.returncode == 2 and err.startswith(line) and err.count("\n") == 1
    swallows = "import time\nwhile True:\n try: time.sleep(1000)\n except BaseException: pass"
    command = start(tmp_path, swallows, limit=0.5)
    _, err = command.communicate(timeout=300)
    assert command.returncode == 2 and err.count("\n") == 1
    assert err.startswith("megatron-rl: the import of log.trackers = 'own_tracker:Tracker' did not end within 0.5 s, and swallows")


@pytest.mark.parametrize("module", ["import time; time.sleep(99)", "while True: pass", "import asyncio; asyncio.run(asyncio.sleep(99))"])
def test_ctrl_c_during_an_import_interrupts_the_command(tmp_path, module):
    command = start(tmp_path, f"open('imported', 'w').close()\n{module}")
    while not (tmp_path / "imported").exists():
        assert command.poll() is None
        time.sleep(0.02)
    time.sleep(0.2)
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=300)
    assert (command.returncode, err) == (130, "megatron-rl: interrupted\n")


def nest_and_hang():
    with user_code.contain("outer", 0.2):
        with user_code.contain("inner", 60):
            pass
        time.sleep(30)


def test_timers_and_calls_nest(monkeypatch):
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("the outer timer fired"))
    try:
        signal.setitimer(signal.ITIMER_REAL, 500)
        with user_code.contain("outer", 60), user_code.contain("inner", 60):
            assert user_code.list_running() == ["inner"]
        assert 400 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500 and user_code.list_running() == []
        with pytest.raises(user_code.UserCodeError, match=r"within 0.2 s"):
            nest_and_hang()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
