"""The lock of models on the hub: in the user's own folder, without links, with a limit, and with a line while it waits."""

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from megatron_rl.errors import RunError, UserError
from megatron_rl.hf import hub
from megatron_rl.hf.hub import _lock
from megatron_rl.hf.node_lock import make_cache_folder, node_lock

MODEL, PATH = hub.HubModel("someone/unknown", None), Path("hf:someone/unknown")
HOLD = "import fcntl, sys; file = open(sys.argv[1]); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "megatron-rl"


@pytest.fixture
def lock(cache) -> Path:
    """The file of the model's lock."""
    with _lock(MODEL, PATH, "model.path"):
        pass
    (path,) = cache.iterdir()
    return path


@pytest.fixture
def holder(lock):
    """Another process that holds the lock."""
    with subprocess.Popen([sys.executable, "-c", HOLD, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def refusal(model: hub.HubModel = MODEL) -> str:
    with pytest.raises(UserError) as caught, _lock(model, PATH, "model.path"):
        pytest.fail("the lock was taken")
    return str(caught.value)


def test_the_lock_is_a_file_that_only_its_user_can_reach(lock):
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (lock.parent, lock)]
    assert modes == [0o700, 0o600]
    with _lock(hub.HubModel("someone/other", None), PATH, "model.path"), _lock(MODEL, PATH, "model.path"):
        assert len(list(lock.parent.iterdir())) == 2, "each model has its own"


def test_what_others_hold_in_the_temporary_folder_does_not_matter(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"megatron-rl-{os.getuid()}-someone--unknown.lock").symlink_to(tmp_path / "victim")
    with _lock(MODEL, PATH, "model.path"):
        assert not (tmp_path / "victim").exists()


def test_a_process_that_waits_says_so_once_and_then_goes_on(lock, holder, capsys):
    threading.Timer(1.0, holder.kill).start()
    with _lock(MODEL, PATH, "model.path"):
        pass
    assert capsys.readouterr().out == f"waiting until another process has fetched hf:someone/unknown ({lock})\n"


def test_a_wait_has_a_limit(lock, holder, monkeypatch):
    monkeypatch.setattr(hub, "LOCK_SECONDS", 0.5)
    line = refusal()
    assert line.startswith(f"model.path = 'hf:someone/unknown': is being fetched by another process, which has held {lock} for 0.5 s; ")


def test_errors_inside_release_the_lock(lock):
    with pytest.raises(RunError), _lock(MODEL, PATH, "model.path"):
        raise RunError("broken")
    with node_lock(MODEL.repository, 0.0, pytest.fail, ValueError):
        pass


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder"])
def test_a_lock_that_is_no_file_is_refused(lock, tmp_path, kind):
    lock.unlink()
    other = tmp_path / "other"
    if kind == "link":
        other.write_text("mine")
    if kind.endswith("link"):
        lock.symlink_to(other)
    else:
        lock.mkdir()
    assert refusal().startswith(f"XDG_CACHE_HOME = '{lock}': cannot be locked (")
    assert other.exists() == (kind == "link") and (kind != "link" or other.read_text() == "mine")


@pytest.mark.parametrize("kind", ["link", "writable by all", "file", "parent is a file"])
def test_a_folder_that_is_not_the_users_own_is_refused(cache, tmp_path, kind):
    (cache.parent if kind != "parent is a file" else tmp_path).mkdir(exist_ok=True)
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        cache.symlink_to(tmp_path / "elsewhere")
    elif kind == "writable by all":
        cache.mkdir()
        cache.chmod(0o777)
    else:
        (cache if kind == "file" else cache.parent).write_text("")
    line = refusal()
    assert line.startswith("XDG_CACHE_HOME = ") and "; name a folder of your own" in line and "\n" not in line
    assert kind != "link" or not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("given", ["", "relative/folder"])
def test_without_an_absolute_path_the_folder_is_in_the_users_home(given, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert make_cache_folder() == tmp_path / ".cache" / "megatron-rl"
    assert not (tmp_path / "relative").exists()
