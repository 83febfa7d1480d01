"""Every kind of damage to a run's folder costs what is damaged: the page says what it left out, or the command says one line."""

import json
import os
import shutil
import signal
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import megatron_rl.training.loop  # noqa: F401 - with all that declares metrics
from megatron_rl.cli.main import app
from megatron_rl.config import Config
from megatron_rl.config.reading import keep_valid
from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.mcore.checkpoint.run_weights import read_state
from megatron_rl.observability.run_folder import METRICS, SAMPLES, read_jsonl, read_metrics
from megatron_rl.observability.run_log import RunLog
from megatron_rl.preflight.resumed_run import find_run_to_resume
from megatron_rl.reporting.comparison import write_comparison
from megatron_rl.reporting.report import write_report
from megatron_rl.training.resume import choose_checkpoint
from megatron_rl.versions import collect_versions

DEEP = b"[" * 100_000
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9">{}</svg>'
OPERATOR = {"name": "mm", "calls": 7, "device_ms": 0.0, "host_ms": 1.5}
PROFILE = {"step": 2, "rank": 0, "micro_batches": 4, "operators": [OPERATOR]}
SHARE = {"value": 0.5, "low": 0.4, "high": 0.6}
SIDE = {"path": "x", "step": 2, "table": [{"problems": 30, "mean": SHARE, "pass": {}, "maj": {}}]}
EVAL = {"sampling": {"samples": 8}, "ks": [1], "comparison": [], "sides": {"checkpoint": SIDE}}


def config(runs: Path, resume: str = "auto") -> Config:
    given = {"model": {"path": "m"}, "log": {"dir": str(runs), "trackers": []}, "checkpoint": {"resume": resume}, "train": {"steps": 9}}
    return Config.model_validate_json(json.dumps(given))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run that broke after step 2, with a file of each kind."""
    for module in ("report", "comparison"):  # drawing takes most of the time
        monkeypatch.setattr(f"megatron_rl.reporting.{module}.render_svg", lambda *_: "<svg></svg>")
    log = RunLog.create(tmp_path / "runs", config(tmp_path / "runs").model_dump(mode="json"), collect_versions())
    for step in range(3):
        log.write_step(
            {"step": step, "reward/mean": 0.5, "eval/accuracy": 0.1 * step, "time/step": 1.0, "sync/tensors": 4, "sync/proved": 4}
        )
        log.write_samples(
            step, [{"prompt": "1 + 1", "completion": "2", "level": 1, "reward": 1.0, "correct": True, "parts": {"math": 1.0}}]
        )
    log.finish("broken", "a reason")
    for name, content in {"profile/step_00002_rank_00000.json": PROFILE, "eval/step_2/eval.json": EVAL}.items():
        (log.dir / name).parent.mkdir(parents=True)
        (log.dir / name).write_text(json.dumps(content))
    (log.dir / "graph.svg").write_text(SVG.format("<text>lm_head</text>"))
    folder = checkpoints.checkpoint_folder(log.dir, 2)
    hidden = checkpoints.unfinished_folder(folder)
    (hidden / "mcore").mkdir(parents=True)
    (hidden / "mcore" / ".metadata").touch()
    counts = {"policy_version": 2, "optimizer_steps": 2, "adam_step": 2, "data": {"position": 8, "fingerprint": "x"}}
    precision = config(tmp_path).precision.model_dump(mode="json")
    files = checkpoints.checksum_files(hidden, ["mcore/.metadata"])
    checkpoints.write_state(hidden, {"step": 2, **counts, "precision": precision, "versions": collect_versions(), "files": files})
    checkpoints.publish(hidden, folder, 0)
    shutil.copytree(log.dir, tmp_path / "runs" / "other")
    signal.alarm(120)  # a pipe that nobody writes would hold a command for ever
    yield log.dir
    signal.alarm(0)


def edit(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def append(path: Path, line: bytes) -> None:
    path.write_bytes(path.read_bytes() + line)


def insert(path: Path, line: bytes) -> None:
    first, rest = path.read_bytes().split(b"\n", 1)
    path.write_bytes(first + b"\n" + line + b"\n" + rest)


WRITE = {
    "nothing": b"", "a torn object": b'{"step": 2, "re', "NUL bytes": b"\0" * 4096, "invalid UTF-8": b'{"step": 2, "a": "\xff\xfe"}',
    "a list": b"[]",
    "a number": b"7", "null": b"null", "100,000 brackets": DEEP, "nested objects": b'{"a":' * 100_000,
    "500 brackets": b"[" * 500 + b"]" * 500,
    "a number of 5,000 digits": b'{"step": ' + b"9" * 5000 + b"}", "UTF-16": '{"step": 2}'.encode("utf-16"),
    "a picture": b"\x89PNG\r\n\x1a\n\0\0",
    "half a surrogate pair": b'{"\\ud800": "\\udfff", "step": 2, "status": "\\ud800"}', "a status alone": b'{"status": "finished"}',
}  # fmt: skip
KINDS = {name: lambda path, content=content: path.write_bytes(content) for name, content in WRITE.items()}
KINDS |= {"a pipe": fifo, "a folder": folder, "a loop": lambda path: (path.unlink(), path.symlink_to(path)), "gone": Path.unlink}
FILES = ["run.json", "metrics.jsonl", "samples.jsonl", "run.log", "graph.svg", "profile/step_00002_rank_00000.json",
"eval/step_2/eval.json",
         "checkpoints/step_00002/state.json"]  # fmt: skip
RUN_FIELDS = {
    "status": [1, None, "great"], "started": [5, "yesterday", "0001-01-01", "9999-12-31T23:59:59"], "ended": ["", []], "host": [[]],
    "reason": [7], "argv": ["train", [1]], "versions": [[], {"torch": 2}], "models": [[], {"model.path": 1}], "cwd": [5], "contents": [[]],
    "config": [[], {"train": []}, {"train": {"steps": "9"}}, {"train": {"steps": -1}}, {"a": {"b": [[[1]]]}}], "resumed": [{}, [1],
    [{"step": "x"}]],
    "metrics": [{}, [1], [{"name": 1}], [{"name": "a{}b{}{}", "meaning": ""}], [{"name": "reward/mean", "meaning": "m", "unit": "furlong"}],
                [{"name": "reward/mean", "meaning": "$\\frac{", "panels": ["$x^{"], "label": "$\\sqrt$"}]],
}  # fmt: skip
STEP = b'{"step": 2, '
ROWS = [b'{"step": NaN}', b'{"step": 1e999}', b'{"step": -1}', b'{"step": "2"}', b'{"step": true}', b'{"reward/mean": 1}', b'{"step": 2.0}',
        STEP + b'"reward/mean": "high"}', STEP + b'"a": [1]}', b'{"step": 1099511627775, "time/step": 1.0}',
        STEP + b'"reward/mean": 1e308, "time/step": -1e308}', STEP + b'"unix_time": 1e300}', STEP + b'"unix_time": -5}',
        STEP + b'"reward/mean": ' + b"9" * 400 + b"}", b'{"step": 0, "level": "hard"}',
        STEP + b'"level": [1], "parts": [], "dialogue": "ab", "reward": "x", "prompt": 5}']  # fmt: skip


def check_all(run: Path) -> dict[str, str]:
    """Run everything that reads a run's folder. Return the line of each error, and the page of the report."""
    result = CliRunner().invoke(app, ["report", str(run)])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (0, 2) and result.stderr.count("\n") == (result.exit_code == 2), result.output
    found = {"report": result.stderr, "page": "" if result.stderr else (run / "report.html").read_text()}
    calls = {"comparison": lambda: write_comparison([run, run.parent / "other"], run.parent / "comparison.html")}
    calls |= {"resume": lambda: resume(run), "read_state": lambda: read_state(run / "checkpoints" / "step_00002")}
    for name, call in calls.items():
        try:
            call()
            found[name] = ""
        except UserError as error:
            found[name] = str(error)
    assert all(line.isprintable() for name, line in found.items() if name not in ("report", "page"))
    return found


def resume(run: Path) -> None:
    found = find_run_to_resume(config(run.parent, str(run)))
    assert found is not None
    found.check_problems(SimpleNamespace(fingerprint="x", templates={}))
    point = choose_checkpoint(run, 9)
    point.describe({"tp": 1})
    log = RunLog.reopen(run, found.config.model_dump(mode="json"), collect_versions(), {}, point.state["step"])
    log.write_step({"step": 3, "reward/mean": 0.5})
    log.finish("finished")
    assert read_metrics(run)[-1]["step"] == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_any_file_may_be_anything(run, file, kind):
    KINDS[kind](run / file)
    found, name = check_all(run), Path(file).name
    if file == "run.json" and kind != "a status alone":
        assert "RUN_DIR = " in found["report"] and "run.json" in found["report"] and "checkpoint.resume = " in found["resume"]
        assert "RUN_DIR = " in found["comparison"]
    elif file in FILES[4:7] and kind not in ("gone", "nothing"):
        assert f"{name} was left out: " in found["page"], found
    elif kind in ("a pipe", "a folder") and file in FILES[:4]:
        assert f"its {name} is not a regular file" in found["resume"]
    elif file == FILES[-1]:
        assert "checkpoint.resume" in found["resume"] and "--checkpoint = " in found["read_state"]


@pytest.mark.parametrize("field", RUN_FIELDS)
def test_any_field_of_run_json_may_have_any_type(run, field):
    whole = (run / "run.json").read_bytes()
    for value in RUN_FIELDS[field]:
        (run / "run.json").write_bytes(whole)
        edit(run / "run.json", **{field: value})
        found = check_all(run)
        if field == "status":
            assert "status" in found["report"]
        elif "$" not in str(value) and value != {"a": {"b": [[[1]]]}}:
            assert f"run.json: left out: {field}" in found["page"] and "run.json is damaged: " in found["resume"], value


@pytest.mark.parametrize("file, kind", [("metrics.jsonl", METRICS), ("samples.jsonl", SAMPLES)])
def test_any_line_may_be_anything_and_the_others_stay(run, file, kind):
    whole = (run / file).read_bytes()
    for line in (*ROWS, *WRITE.values()):
        for place in (append, insert):
            (run / file).write_bytes(whole)
            place(run / file, line)
            rows, warning = read_jsonl(run / file, kind)
            assert (3 <= len(rows) <= 4 and not warning) or warning.startswith(f"{file}: "), line
    for line in (*ROWS, *WRITE.values()):
        insert(run / file, line)
    append(run / file, b'{"step": 2, "rew')
    found = check_all(run)
    assert f"{file}: left out: line " in found["page"] and " more; the last line (line " in found["page"] and not found["resume"]
    kept = (run / file).read_bytes()
    assert all(line in kept for line in whole.splitlines()) and DEEP in kept, "a resumed run keeps what it does not understand"


def test_a_resumed_run_keeps_the_rows_after_a_damaged_line(run, capsys):
    insert(run / "metrics.jsonl", b"damaged")
    append(run / "metrics.jsonl", b'{"step": 3}\n{"step": 4, "to')
    resume(run)
    assert [row["step"] for row in read_metrics(run)] == [0, 1, 2, 3] and b"damaged" in (run / "metrics.jsonl").read_bytes()
    assert "metrics.jsonl: left out: line 2 (not JSON)" in capsys.readouterr().err


@pytest.mark.parametrize("content", [
    "<script>alert(1)</script>", "<text onclick='x'>a</text>", "<image href='http://evil/x.png'/>",
    "<a href='javascript:x'><text>a</text></a>",
    "<foreignObject><p>a</p></foreignObject>", "<style>body { display: none }</style>", "<style>@import 'http://evil/x.css';</style>",
    "<style>.precision-graph-r1 { background: url(http://evil) }</style>", "<style>.precision-graph-r1, body { fill: red }</style>",
    "<rect fill='url(http://evil#x)'/>", "<text class='state'>a</text>", "<text id='top'>a</text>", "<use href='#x'/>", "<animate/>",
    "<g style='position: fixed'/>", "<text xmlns='http://www.w3.org/1999/xhtml'>a</text>", "<text>&lt;script&gt;alert(1)</text>",
])  # fmt: skip
def test_a_foreign_graph_is_an_image_which_cannot_change_the_page_around_it(run, content):
    (run / "graph.svg").write_text(SVG.format(content))
    page = write_report(run).read_text()
    picture = b64encode(SVG.format(content).encode()).decode()
    assert page.count(f'<img src="data:image/svg+xml;base64,{picture}"') == 1 and "evil" not in page and "<script>" not in page
    assert "left out" not in page


@pytest.mark.parametrize(("content", "reason"), [
    ('<!DOCTYPE svg [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;">]>' + SVG.format("&b;"), "cannot be read (it has a declaration)"),
    (SVG.format("<text"), "it is not an SVG file ("), (SVG.format("]]>"), "it is not an SVG file ("),
    ("<html><script>alert(1)</script></html>", "cannot be read (it is not an SVG file)"),
])  # fmt: skip
def test_a_graph_that_is_no_svg_file_or_has_entities_is_left_out(run, content, reason):
    (run / "graph.svg").write_text(content)
    page = write_report(run).read_text()
    assert f"graph.svg was left out: {reason}" in page and "<img" not in page and "<script>" not in page


def test_the_graph_shows_no_token(run):
    (run / "graph.svg").write_text(SVG.format(f"<text>hf_{'a' * 34}</text>"))
    assert b64encode(SVG.format("<text>***</text>").encode()).decode() in write_report(run).read_text()


def test_two_runs_without_rows_are_compared(run, tmp_path):
    (run / "metrics.jsonl").write_bytes(b"")
    other = shutil.copytree(run, tmp_path / "$other_{")
    assert "2 runs compared" in write_comparison([run, other], tmp_path / "page.html").read_text()


def test_labels_from_a_disk_are_no_formulas(run, tmp_path, monkeypatch):
    monkeypatch.undo()  # draws the plots
    declared = [
        {"name": "reward/mean", "meaning": "m", "panels": ["$x^{"], "label": "$\\frac{"},
        {"name": "time/step", "meaning": "m", "panels": ["seconds of a step"]},
    ]
    edit(run / "run.json", metrics=declared)
    append(run / "metrics.jsonl", b'{"step": 1099511627775, "time/step": 1e99, "reward/mean": -1e99}\n')
    page = write_report(run).read_text()
    assert "$x^{" in page
    write_comparison([run, shutil.copytree(run, tmp_path / "$other_{")], tmp_path / "page.html")


def test_what_is_left_out_is_named_from_the_outside_in():
    rows = {"step": 1, "parts": {"a": "x", "b": 1}, "dialogue": ["a", 1, 2, "b", None], "level": []}
    kept, problems = keep_valid(SAMPLES, rows)
    assert kept == {"step": 1, "parts": {"b": 1}, "dialogue": ["a", "b"]}
    assert [problem.split(" ")[0] for problem in problems] == ["level", "parts.a", "dialogue.1", "dialogue.2", "dialogue.4"]
    assert keep_valid(SAMPLES, [1]) == (None, ["all (Input should be a valid dictionary)"])
