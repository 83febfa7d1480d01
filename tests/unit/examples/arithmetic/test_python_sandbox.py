"""The sandbox of the agent's tool: code computes and prints, and reaches nothing."""

from __future__ import annotations

import platform

import pytest

from examples.arithmetic import sandbox
from examples.arithmetic.python_agent import call_tool
from examples.arithmetic.sandbox import run_python

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the sandbox knows the system calls of x86-64")


@pytest.mark.parametrize(
    "code, printed",
    [
        ("print(5+3-6)", "2"),
        ("import math, fractions\nprint(math.gcd(12, 18), fractions.Fraction(1, 3))", "6 1/3"),
        ("print(1)\nprint(1/0)", "1\nZeroDivisionError: division by zero"),
        ("print('x' * 5000)", "x" * 1000),
        ("raise SystemExit(3)", ""),
        ("print(", "SyntaxError: '(' was never closed"),
    ],
)
def test_code_computes_and_prints(code, printed):
    assert run_python(code) == printed


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read()",
        "open('/tmp/made', 'w')",
        "import os; os.listdir('/')",
        "import os; os.fork()",
        "import os; os.execv('/bin/sh', ['sh'])",
        "import os; os.kill(1, 0)",
        "import socket; socket.socket()",
        "import subprocess; subprocess.run(['ls'])",
        "import ctypes; ctypes.CDLL(None).socket(2, 1, 0) == -1 or print('reached')\nraise PermissionError('so')",
    ],
)
def test_code_reaches_nothing(code):
    """Modules that it did not import beforehand cannot be read from disk either."""
    reply = run_python(code)
    assert "reached" not in reply and ("Error" in reply or "ended by signal" in reply), reply


def test_code_is_bounded(monkeypatch):
    monkeypatch.setattr(sandbox, "MEMORY_MB", 256)
    assert "MemoryError" in run_python("x = 'a' * (1 << 30)")
    endless = run_python("while True: pass")
    assert endless == "no result after 2 seconds" or "signal" in endless
    assert len(run_python("while True: print('x' * 1000)")) <= 2001


def test_the_tool_answers_calls_that_make_no_sense():
    assert call_tool('{"code": "print(7)"}') == "7"
    assert call_tool("{") == "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"
    assert (
        call_tool("{}") == "KeyError: 'code'"
        and call_tool("[]").startswith("TypeError")
        and call_tool('{"code": 3}') == "code must be a text"
    )
