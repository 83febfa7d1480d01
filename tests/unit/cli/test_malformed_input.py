"""No value that a user can write ends a command with a traceback: named cases, and a fuzz test over all commands."""

import os
import sys
import types

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.models import make_checkpoint
from typer.testing import CliRunner

from megatron_rl.cli import evaluate, main, rehearse
from megatron_rl.cli.main import app
from megatron_rl.config import Config
from megatron_rl.config.launch import read_launch
from megatron_rl.errors import RunError, UserError

DEEP, DIGITS, LONG = 5000, 5000, "a" * 300
MODEL = '[model]\npath = "model"\n'
REWARD = f"{MODEL}[[reward.functions]]\n"
CASES = {
    "nested lists": f"{MODEL}x = {'[' * DEEP}{']' * DEEP}",
    "nested tables": f"{MODEL}x = {'{a=' * DEEP}1{'}' * DEEP}",
    "dotted keys": MODEL + ".".join("a" * DEEP) + " = 1",
    "nested settings": f"{MODEL}[data]\nsettings = {{a = {'[' * 198}1{']' * 198}}}",
    "a huge integer": f"{MODEL}[train]\nsteps = {'9' * DIGITS}",
    "an integer of 120 digits": f"{MODEL}[train]\nsteps = {'9' * 120}",
    "a huge hexadecimal integer": f"{MODEL}[train]\nsteps = 0x{'f' * DIGITS}",
    "an integer as large as no float": f"{MODEL}[train]\nlearning_rate = 0x{'f' * 400}",
    "not a number": f"{MODEL}[train]\nlearning_rate = nan",
    "a date": f"{MODEL}[train]\nlearning_rate = 2026-01-01",
    "a long path": f'[model]\npath = "{LONG}"',
    "a path of many folders": f'[model]\npath = "{"a/" * 3000}"',
    "NUL in a path": '[model]\npath = "a\\u0000b"',
    "NUL in a teacher's path": f'{MODEL}[teacher]\npath = "a\\u0000b"',
    "NUL in a source": f'{MODEL}[data]\ntrain = "a\\u0000.jsonl"',
    "a long source": f'{MODEL}[data]\neval = "{LONG}.jsonl"',
    "a long run": f'{MODEL}[checkpoint]\nresume = "{LONG}"',
    "a long template": f'{MODEL}[data]\nprompt_template_file = "{LONG}"',
    "a huge repeat": f'{REWARD}name = "format"\npattern = "a{{99999999999}}"',
    "a bad pattern": f'{REWARD}name = "format"\npattern = "(?P<a"',
    "a nested pattern": f'{REWARD}name = "format"\npattern = "{"(" * DEEP}{")" * DEEP}"',
    "CR and LF in a URL": f'{REWARD}name = "http"\nurl = "http://a\\r\\nX: y/"',
    "NUL in a URL": f'{REWARD}name = "http"\nurl = "http://a\\u0000/"',
    "a port above 65535": f'{REWARD}name = "http"\nurl = "http://a:99999/"',
    "a long host in a URL": f'{REWARD}name = "http"\nurl = "http://{LONG}/"',
    "NUL in a host": f'{MODEL}[sync]\nhost = "a\\u0000"',
    "a long host": f'{MODEL}[sync]\nhost = "{LONG}"',
    "a long text for a number": f'{MODEL}[train]\nsteps = "{"x" * 100_000}"',
    "a long key": f"{MODEL}{'k' * 100_000} = 1",
    "a key with escapes": f'{MODEL}"\\u001b[2J\\n" = 1',
    "a repeated key": "[train]\nsteps = 1\nsteps = 2\n",
    "NUL": f"{MODEL}[train]\nsteps = 1\0\n",
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A working directory with a model, where all commands end where they would start something."""

    def stop(*_: object) -> None:
        raise RunError("started")

    folder = tmp_path_factory.mktemp("workplace")
    make_checkpoint(folder / "model")
    with pytest.MonkeyPatch.context() as scene:
        scene.chdir(folder)
        session, graph = types.ModuleType("megatron_rl.training.session"), types.ModuleType("megatron_rl.cli.graph")
        session.run_session, graph.show_graph = stop, stop
        scene.setitem(sys.modules, "megatron_rl.training.session", session)
        scene.setitem(sys.modules, "megatron_rl.cli.graph", graph)
        scene.setattr(rehearse, "install_device", stop)
        scene.setattr(evaluate, "start_engines", stop)
        scene.setattr(main, "use_private_temporary_folder", lambda: None)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            scene.delenv(name, raising=False)
        yield folder


def run(*words: str) -> tuple[int, list[str]]:
    """Run a command. Return its exit code and the lines of its error, after asserting that no traceback was printed."""
    result = CliRunner().invoke(app, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    return result.exit_code, result.stderr.splitlines()


def write(folder, text: str | bytes) -> str:
    (folder / "run.toml").write_bytes(text.encode() if isinstance(text, str) else text)
    return "run.toml"


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize("case", CASES)
def test_a_malformed_config_is_one_short_line_for_each_mistake(workplace, case, command):
    code, lines = run(command, write(workplace, CASES[case]))
    assert code == 2 and lines and all(line.startswith("megatron-rl: ") and line.isprintable() for line in lines), lines
    assert max(map(len, lines)) < 1000, max(lines, key=len)
    values = [line.partition(" = ")[2].partition(": ")[0] for line in lines]
    assert all(len(value) <= 260 for value in values), values


@pytest.mark.parametrize("make, rule", [
    (lambda path: path.write_bytes(MODEL.encode("utf-16")), "is not a UTF-8 text file"),
    (lambda path: path.write_bytes(b"\xff\x00"), "is not a UTF-8 text file"),
    (lambda path: path.mkdir(), "cannot be read (it is not a regular file)"),
    (os.mkfifo, "cannot be read (it is not a regular file)"),
    (lambda path: path.symlink_to("/dev/zero"), "cannot be read (it is not a regular file)"),
    (lambda path: path.symlink_to(path), "cannot be read (Too many levels of symbolic links)"),
    (lambda path: None, "does not exist"),
])  # fmt: skip
def test_a_config_that_is_no_text_file(workplace, tmp_path, make, rule):
    make(tmp_path / "odd.toml")
    code, (line,) = run("train", str(tmp_path / "odd.toml"))
    assert code == 2 and f": {rule};" in line and line.startswith("megatron-rl: CONFIG = ")


def test_a_long_name_of_a_config_or_an_output(workplace):
    for words in (["train", LONG], ["plan", f"{LONG}/a"], ["report", LONG], ["report", LONG, "model"],
                  ["export", "--checkpoint", LONG, "--output", "o"], ["export", "--checkpoint", "model", "--output", LONG],
                  ["eval", "run.toml", "--checkpoint", LONG, "--output", LONG]):  # fmt: skip
        write(workplace, f'{MODEL}[data]\neval = "examples.arithmetic.task:Arithmetic"')
        code, lines = run(*words)
        assert code == 2 and len(lines) == 1, (words, lines)


def test_several_mistakes_of_a_config_are_shown_together(workplace):
    code, lines = run("train", write(workplace, "[train]\nstepz = 1\nlearning_rate = 'x'\n[rollout]\nhosts = ['0.0.0.0']\n"))
    assert code == 2 and [line.removeprefix("megatron-rl: ").split(" = ")[0].split(":")[0] for line in lines] == [
        "train.stepz", "model", "train.learning_rate", "rollout.hosts.0",
    ]  # fmt: skip
    code, lines = run("train", write(workplace, MODEL + "".join(f"k{number} = 1\n" for number in range(50))))
    assert code == 2 and len(lines) == 21 and lines[-1] == "megatron-rl: config: has 30 more mistakes"


@pytest.mark.parametrize("override", [
    f"--train.steps={'[' * DEEP}", f"--train.steps={'9' * DIGITS}", f"--train.steps=0x{'f' * 9000}", f"--{'a.' * DEEP}b=1",
    "--log.dir=\udcff", "--train.\udcff=1", "--model.path=a\0b", f"--log.dir={LONG}", "--train.steps=1\n[x]", "--x\x1b[2J=1",
])  # fmt: skip
def test_malformed_overrides(workplace, override):
    code, lines = run("train", write(workplace, MODEL), override)
    assert code == 2 and lines and all(len(line) < 1000 and line.isprintable() for line in lines), lines


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("name, text", [
    ("WORLD_SIZE", "abc"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "-1"), ("WORLD_SIZE", "9" * 5000), ("WORLD_SIZE", "²"),
    ("WORLD_SIZE", "1.0"), ("RANK", "abc"), ("RANK", "2"),
    ("LOCAL_RANK", "7"), ("LOCAL_WORLD_SIZE", "x"), ("MASTER_PORT", "99999"), ("MASTER_PORT", "0"),
    ("MASTER_PORT", "http"), ("MASTER_PORT", ""), ("MASTER_ADDR", " "), ("RANK", ""),
])  # fmt: skip
def test_a_launchers_variables(monkeypatch, name, text):
    assert read_launch(joins=True, environment=LAUNCHED)[:4] == (0, 2, 0, 2)
    with pytest.raises(UserError, match=f"^{name}") as caught:
        read_launch(joins=True, environment=LAUNCHED | {name: text})
    assert "start the ranks with torchrun" in caught.value.fix


def test_no_launcher_and_one_that_says_several_wrong_things():
    assert read_launch(joins=True, environment={}) == (0, 1, 0, 1, False)
    with pytest.raises(UserError) as caught:
        read_launch(joins=True, environment=LAUNCHED | {"WORLD_SIZE": "abc", "MASTER_PORT": "99999", "MASTER_ADDR": ""})
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR:"]


@pytest.mark.parametrize("name, text", [("WORLD_SIZE", "abc"), ("MASTER_PORT", "99999"), ("LOCAL_RANK", "x"), ("WORLD_SIZE", "9" * 30)])
def test_commands_name_the_launchers_variable(workplace, monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    write(workplace, f'{MODEL}[data]\ntrain = "examples.arithmetic.task:Arithmetic"')
    code, (line,) = run("train", "run.toml")
    assert code == 2 and line.startswith(f"megatron-rl: {name} = '{text}': must be an integer from ")


EVAL = ["eval", "run.toml", "--checkpoint", "model"]


@pytest.mark.parametrize("words", [
    [*EVAL, "--at", "9" * DIGITS], [*EVAL, "--at", "1,²"], [*EVAL, "--at", "0"], [*EVAL, "--samples", "9" * 30],
    ["rehearse", "run.toml", "--ranks", "9" * DIGITS], ["rehearse", "run.toml", "--ranks", "²"], ["rehearse", "run.toml", "--ranks", "-1"],
    ["rehearse", "run.toml", "--nodes", "9" * 30], ["plan", "run.toml", "--gpus-per-node", "9" * 30],
    ["plan", "run.toml", "--gpu", "\x1b[2J"],
])  # fmt: skip
def test_malformed_options(workplace, words):
    write(workplace, VALID)
    code, (line,) = run(*words)
    assert code == 2 and len(line) < 600 and line.isprintable()


def test_a_rank_that_is_no_number_does_not_hide_the_error(workplace, monkeypatch):
    monkeypatch.setenv("RANK", "²")
    assert run("train", write(workplace, "[train]\nsteps = 0"))[1][0].startswith("megatron-rl: model: is required")


def test_a_temporary_folder_that_cannot_be_used(workplace, monkeypatch):
    monkeypatch.setattr(main, "use_private_temporary_folder", lambda: os.mkdir("/proc/megatron-rl"))
    monkeypatch.setenv("TMPDIR", "/proc")
    code, (line,) = run("train", write(workplace, MODEL))
    assert code == 2 and line.startswith("megatron-rl: TMPDIR = '/proc': ")


def list_fields(section: type, prefix: str = "") -> list[str]:
    names = []
    for name, info in section.model_fields.items():
        inner = info.annotation if hasattr(info.annotation, "model_fields") else None
        names += list_fields(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return names


FIELDS = [name for name in list_fields(Config) if name not in ("model.path", "log.dir")]
ODD = ["", "0", "-1", "1e999", "nan", "inf", "true", "[]", "[[]]", "{}", "9" * DIGITS, "9" * 25, "a:b", "hf:a/b", "hf:", "a\0b", "\x1b[2J",
       "\ud800", "\udcff", LONG, "/", "..", "0x" + "f" * DIGITS, "[" * DEEP, "'\n'", '"""', "1979-05-27", "http://a\n", "²", "0.0.0.0",
       "🙂" * 70, "[1, 'a', {}]", "{a = nan}", "['\\u0000']", "model", "/dev/zero", "never", "math",
       "examples.arithmetic.task:Arithmetic"]  # fmt: skip
VALUES = st.sampled_from(ODD) | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str)
OVERRIDES = st.lists(st.builds("--{}={}".format, st.sampled_from(FIELDS) | st.text(min_size=1, max_size=8), VALUES), max_size=2)
PATHS = st.sampled_from(["model", "run.toml", "absent", "", ".", LONG, "a\0b", "\udcff", "/dev/null", "hf:", "hf:a", "model/x/y", "\x1b"])
OPTIONS = {
    "train": {},
    "eval": {"--checkpoint": PATHS, "--baseline": PATHS, "--samples": VALUES, "--at": VALUES, "--output": PATHS},
    "plan": {"--nodes": VALUES, "--gpus-per-node": VALUES, "--gpu": VALUES, "--top": VALUES},
    "rehearse": {"--nodes": VALUES, "--gpus-per-node": VALUES, "--gpu": VALUES, "--ranks": VALUES, "--json": PATHS},
    "graph": {"--svg": PATHS, "--json": PATHS},
    "export": {"--checkpoint": PATHS, "--output": PATHS, "--precision": VALUES, "--align": VALUES, "--tensor-parallel": VALUES},
}
VALID = f'{MODEL}[data]\neval = "examples.arithmetic.task:Arithmetic"'
TEXTS = st.just(VALID) | st.just(MODEL) | st.sampled_from([*CASES.values(), ""]) | st.text(max_size=40)


@st.composite
def commands(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Draw the text of a config and the words of a command."""
    command = draw(st.sampled_from([*OPTIONS, "report", "doctor", "train", "plan"]))
    if command == "report":
        return "", [command, *draw(st.lists(PATHS, max_size=2))]
    takes = OPTIONS.get(command) or {"--x": VALUES}
    words = [
        word for option in draw(st.lists(st.sampled_from(list(takes)), unique=True, max_size=3)) for word in (option, draw(takes[option]))
    ]
    config = ["run.toml"] if draw(st.integers(0, 9)) else [draw(PATHS)]
    return draw(TEXTS), [command, *(config if command not in ("export", "doctor") else []), *words, *draw(OVERRIDES)]


@settings(
    max_examples=150, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True
)
@given(commands())
def test_no_command_ends_with_a_traceback(workplace, drawn):
    text, words = drawn
    write(workplace, text.encode("utf-8", "surrogatepass"))
    code, lines = run(*words)
    assert code in (0, 2) or (code == 3 and lines == ["megatron-rl: started"]), (code, lines)
    assert all(len(line) < 2000 for line in lines), max(lines, key=len)
