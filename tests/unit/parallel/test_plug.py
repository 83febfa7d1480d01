"""Plugs are found by a built-in name or as module:attribute, and unsuitable objects are refused in one line."""

from __future__ import annotations

import pytest

from parallel.plug import InputError, Plug

PLUG = Plug("section.field", {"join": "os.path:join"}, takes=("a", "b"))
MODULE = """
def two(a, b): return a + b
def one(a): return a
async def later(a, b): return a
class Holder:
    two = staticmethod(two)
number = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_plugs.py").write_text(MODULE)
    (tmp_path / "broken_plugs.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)


def test_builtin_names_and_modules_in_the_working_directory_are_found():
    assert PLUG.load("join")("a", "b") == "a/b"
    assert PLUG.load("own_plugs:two")(1, 2) == PLUG.load("own_plugs:Holder.two")(1, 2) == 3
    assert PLUG.check_name("own_plugs:two") == "own_plugs:two"


@pytest.mark.parametrize(
    "name, rule",
    [
        ("jion", "must be one of join, or your own as module:attribute"),
        ("own_plugs:three", "AttributeError"),
        ("absent_plugs:two", "ModuleNotFoundError"),
        ("broken_plugs:two", "ZeroDivisionError"),
        ("own_plugs:one", "plain function of (a, b): too many positional arguments"),
        ("own_plugs:later", "plain function of (a, b)"),
        ("own_plugs:number", "plain function of (a, b)"),
    ],
)
def test_unsuitable_objects_are_refused_in_one_line(name, rule):
    with pytest.raises(InputError) as caught:
        PLUG.load(name)
    assert (caught.value.field, caught.value.value) == ("section.field", name)
    assert rule in caught.value.rule and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["jion", "a.b", ":x", "a:", "1a:b", "a b:c"])
def test_a_name_of_another_form_is_refused_without_an_import(name):
    with pytest.raises(ValueError, match="must be one of join"):
        PLUG.check_name(name)
