"""The loader of all plugs: an error of a module, also sys.exit, becomes one line that names the field and the plug, and exit code 2."""

import itertools
import sys

import pytest

from megatron_rl import plugs
from megatron_rl.errors import UserError
from megatron_rl.rollout.engine import find_engine_launcher
from parallel.plug import InputError, Plug
from parallel.transport import TRANSPORTS, load_transport

NUMBERS = itertools.count()  # each module has a name of its own, since a module is imported once
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
    "unprintable": ("class E(Exception):\n def __str__(self): raise KeyError\nraise E", "E: its message cannot be written"),
    "long message": ("raise ValueError('x' * 10**7)", "ValueError: xxx"),
    "its __getattr__ ends the process": ("def __getattr__(name): raise SystemExit(0)", "SystemExit: 0"),
    "syntax": ("def f(:", "SyntaxError"),
    "recursion": ("def f(): f()\nf()", "RecursionError"),
    "not UTF-8": ("x = '\udcff'", "SyntaxError"),
}


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def _write(text):
        name = f"loaded_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(text, errors="surrogateescape")
        return f"{name}:thing"

    return _write


@pytest.mark.parametrize("case", MODULES)
def test_an_error_of_a_module_is_one_line(case, write):
    text, says = MODULES[case]
    with pytest.raises(InputError) as caught:
        Plug("section.field", {}).load(name := write(text))
    assert str(caught.value).startswith(f"section.field = {name}: cannot be imported ({says}")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 900


@pytest.mark.parametrize("field", KINDS)
def test_every_kind_of_plug_is_loaded_by_the_same_loader(field, write):
    text, says = MODULES["sys.exit(0)"]
    with pytest.raises(InputError) as caught:
        (load_transport if field == "sync.transport" else KINDS[field].load)(name := write(text))
    assert str(caught.value).startswith(f"{field} = {name}: cannot be imported ({says}")


def test_a_transport_of_the_wrong_kind_is_refused():
    with pytest.raises(InputError, match="sync.transport = os:path: must be a parallel.transport"):
        load_transport("os:path")


def test_an_engines_package_is_loaded_like_a_plug(write, tmp_path, monkeypatch):
    for number, case in enumerate(("long message", "syntax")):
        module, says = write(MODULES[case][0]).partition(":")[0], MODULES[case][1]
        info = tmp_path / f"own_{number}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: own_{number}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[megatron_rl.rollout]\nown_{number} = {module}:launch\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        with pytest.raises(UserError) as caught:
            find_engine_launcher(f"own_{number}")
        assert str(caught.value).startswith(f"rollout.engine = 'own_{number}': cannot be imported ({says}")
