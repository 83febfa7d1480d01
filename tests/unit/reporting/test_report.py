"""The report and the comparison of runs: one page that loads nothing, escapes everything, and never shows an unfinished run as finished."""

import fcntl
import functools
import json
import math
import socket
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_rl import metrics
from megatron_rl.batch import replay  # noqa: F401 (it declares what a run with replay adds)
from megatron_rl.cli.main import app
from megatron_rl.diagnosis.attribution import CAUSES
from megatron_rl.errors import UserError
from megatron_rl.precision.graph.decoder import Operator, decoder_graph
from megatron_rl.precision.graph.graph import TensorPrecision
from megatron_rl.precision.graph.render import draw_svg
from megatron_rl.reporting.comparison import write_comparison
from megatron_rl.reporting.formatting import format_bytes, format_duration, format_toml, visible
from megatron_rl.reporting.plots import SECTIONS, Plot, fill_sections, render_svg
from megatron_rl.reporting.report import CAUSE_LABELS, headline, write_report
from megatron_rl.training import loop  # noqa: F401 (it declares what the rows of a run hold)

HOSTILE = "</pre><script>alert(1)</script><img src=http://evil/x.png onerror=alert(2)> {{ 7*7 }} \x1b[2J \ud800 &amp;"
STEP = {
    "reward/mean": 0.5, "reward/std": 0.5, "accuracy/train": 0.5, "mismatch/abs_mean": 1e-7, "mismatch/abs_max": 1e-5,
    "mismatch/k3_kl": 0.0, "loss/policy": 0.01, "loss/kl": 0.0, "clip/positive": 0.01, "clip/negative": 0.02, "entropy": 0.4,
    "grad_norm": 1.0, "length/mean": 9.0, "length/max": 16.0, "length/truncated": 0.1, "time/generate": 2.0, "time/train": 1.0,
    "time/sync": 0.2, "draws/surprise": 0.5, "time/proof": 0.1, "time/step": 3.5, "tokens/generated": 900.0, "tokens/per_second": 450.0,
    "correction/mean_positive": 1.0, "correction/mean_negative": 0.9, "correction/touched_positive": 0.0, "clip/bound_low": 0.7,
    "sync/bytes": 2e6, "sync/tensors": 4.0, "sync/proved": 4.0, "router/load_mean": 1.2, "router/load_max": 1.4, "router/dropped": 0.0,
    "router/load/layer_0": 1.0, "router/entropy": 1.5, "router/entropy_min": 1.4, "router/differs": 0.01, "staleness/mean": 0.5,
    "memory/train_mb": 900.0, "precision/response": 1.1, "precision/changed_share": 0.01, "update/abs_mean": 1e-3,
    "mismatch/position/0/abs_mean": 1e-6, "critic/values_mean": 0.4, "critic/returns_mean": 0.5, "critic/explained_variance": 0.1,
    "critic/loss": 0.2, "critic/clip_fraction": 0.01, "teacher/kl": 0.3, "teacher/kl_max": 2.0, "loss/mtp": 1.5,
    "replay/groups": 16.0, "replay/share": 0.4, "replay/age": 1.5,
}  # fmt: skip
STEP |= {f"mismatch/cause/{cause}/{what}": -0.125 for cause in CAUSE_LABELS for what in ("abs_mean", "abs_max", "mean", "k3")}

DRAWN: dict[tuple, str] = {}
SECTION_COUNT = sum(map(len, SECTIONS.values()))


@pytest.fixture(autouse=True)
def render_once(monkeypatch):
    """Draw plots of the same series, with values in the same rows, only once, because drawing takes most of the tests' time."""
    for module in ("report", "comparison"):
        monkeypatch.setattr(f"megatron_rl.reporting.{module}.render_svg", functools.partial(render, module))


def find_plot(title: str, rows: list[dict]) -> Plot:
    (plot,) = (plot for plots in fill_sections(rows, metrics.DECLARED).values() for plot in plots if plot.title == title)
    return plot


def render(module: str, plot: Plot, rows: list[dict], *xlabel: str) -> str:
    names = [name for panel in plot.panels for name, _ in panel.series]
    key = (module, plot.title, *xlabel, *names, *(row.get(name) is None for row in rows for name in names))
    return DRAWN.get(key) or DRAWN.setdefault(key, render_svg(plot, rows, *xlabel))


def make_run(folder: Path, rows: list[dict], status: str = "finished", reason: str = "", samples: list[dict] | None = None) -> Path:
    run = {"status": status, "reason": reason, "started": "2026-01-02T03:04:05+00:00", "ended": "2026-01-02T03:05:05+00:00", "host": "node"}
    run |= {"argv": ["megatron-rl", "train"], "versions": {"torch": "2.13"}, "config": {"train": {"steps": 2, "layout": {"tp": 1}}}}
    run["metrics"] = metrics.dump_declarations()
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples or []))
    return folder


def full_rows() -> list[dict]:
    first = {"eval/accuracy": 0.4, "eval/level_1": 0.6, "eval/level_2": 0.2}
    last = {"eval/accuracy": 0.8, "eval/level_1": 1.0, "eval/level_2": 0.6}
    return [{"step": 0} | first, {"step": 1} | STEP, {"step": 2} | STEP | last]


def sample(step: int, text: str = "#2", correct: bool = True) -> dict:
    texts = dict.fromkeys(("prompt", "completion", "answer", "error"), text)
    return {"step": step, "level": 1, **texts, "reward": 1.0, "correct": correct, "advantage": -0.5, "finish_reason": "length"}


class Page(HTMLParser):
    """Collects the tags, the attributes that load something, the h1 and the text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "data", "action", "srcset")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_whole_page_with_evaluations_and_the_precision_graph(tmp_path: Path):
    run = make_run(tmp_path, full_rows(), samples=[sample(step, correct=step > 1) for step in (1, 2)])
    path = write_report(run)
    page = Page(path)
    assert path == tmp_path / "report.html"
    assert "Held-out accuracy rose from 40.0 % to 80.0 % over 2 steps." in page.text
    assert "✓ finished" in page.text
    assert "✓ all equal" in page.text and "2 syncs, 8 tensors compared, 4 MB moved" in page.text
    for plots in SECTIONS.values():
        for plot in plots:
            assert plot.title in page.text and plot.caption in page.text
    assert page.tags.count("svg") == SECTION_COUNT == page.source.count("<svg viewBox=") <= page.source.count("var(--ink)")
    drawings = page.source[page.source.index("<svg viewBox=") :]
    assert "#00000" not in drawings and "DejaVu" not in drawings, "plots have no color of their own"
    assert "Causes of the mismatch" in page.text and all(words in page.text for words in CAUSE_LABELS.values())
    assert "✗ wrong" in page.text and "✓ correct" in page.text
    assert "[train.layout]\ntp = 1" in page.text and "2.13" in page.text and "Evaluations" not in page.text
    line = {"problems": 30, "mean": {"value": 0.5, "low": 0.4, "high": 0.6}, "pass": {}, "maj": {}}
    results = {"sampling": {"samples": 8}, "ks": [1], "comparison": [], "sides": {"checkpoint": {"step": 2, "table": [line]}}}
    (run / "eval" / "step_2").mkdir(parents=True)
    (run / "eval" / "step_2" / "eval.json").write_text(json.dumps(results))
    high = TensorPrecision("bf16")
    ends = {"embedding": {"weight": high}, "norm": {"x": high}, "lm_head": {"x": high, "weight": high}}
    graph = decoder_graph(high, {}, {name: Operator(inputs) for name, inputs in ends.items()})
    (run / "graph.svg").write_text(draw_svg(graph, graph))
    page = Page(write_report(run))
    assert "Evaluations" in page.text and "eval/step_2" in page.text and "mean@8 50.0 % (40.0–60.0)" in page.text
    (picture,) = (target.removeprefix("data:image/svg+xml;base64,") for target in page.loads if not target.startswith("#"))
    assert "Precision graph" in page.text and "lm_head" in b64decode(picture).decode()
    assert page.tags.count("svg") == SECTION_COUNT and page.tags.count("img") == 1 and "script" not in page.tags


def test_changes_at_resume_are_listed(tmp_path: Path):
    run = make_run(tmp_path, full_rows())
    change = {"field": "rollout.stop", "before": [], "after": [HOSTILE], "moves": "Changes the distribution."}
    state = json.loads((run / "run.json").read_text()) | {"resumed": [{"step": 1}, {"step": 7, "changes": [change]}]}
    (run / "run.json").write_text(json.dumps(state))
    page = Page(write_report(run))
    assert "Changes at resume" in page.text and "rollout.stop" in page.text and "Changes the distribution." in page.text
    assert "script" not in page.tags and not page.handlers


def test_the_page_loads_nothing_and_hostile_text_is_shown_not_obeyed(tmp_path: Path):
    run = make_run(tmp_path, full_rows(), "broken", HOSTILE, [sample(1, HOSTILE)])
    (run / "run.log").write_text(HOSTILE, errors="replace")
    page = Page(write_report(run))
    assert all(target.startswith("#") for target in page.loads), page.loads
    assert not {"script", "link", "iframe", "img", "object", "embed", "base", "form", "image"} & set(page.tags) and not page.handlers
    assert "@import" not in page.source and "url(http" not in page.source
    assert "default-src 'none'" in page.source
    shown = "</pre><script>alert(1)</script><img src=http://evil/x.png onerror=alert(2)> {{ 7*7 }} \\x1b[2J"
    assert page.text.count(shown) == 6  # reason, run.log, prompt, completion, answer, error
    assert " \\xd800 &amp;" in page.text


def test_text_of_an_environment_is_marked(tmp_path: Path):
    row = sample(1, "<<1+1>>2#2") | {"dialogue": ["<<1+1>>", "2", "#2"], "finish_reason": "turns"}
    source = Page(write_report(make_run(tmp_path, full_rows(), samples=[row]))).source
    assert '<pre><span>&lt;&lt;1+1&gt;&gt;</span><span class="environment">2</span><span>#2</span></pre>' in source
    assert "no turns left" in source
    row["dialogue"][1] = HOSTILE
    assert "script" not in Page(write_report(make_run(tmp_path, full_rows(), samples=[row]))).tags


@pytest.mark.parametrize(
    "status, rows, word", [("running", 3, "… not finished"), ("finished", 2, "! ended early"), ("broken", 3, "✗ broken")]
)
def test_only_a_whole_run_looks_finished(tmp_path: Path, status: str, rows: int, word: str):
    page = Page(write_report(make_run(tmp_path, full_rows()[:rows], status)))
    assert word in page.text and "✓ finished" not in page.text
    assert 'class="state finished"' not in page.source


def test_a_run_whose_process_has_ended_without_a_word_was_killed(tmp_path: Path):
    folder = make_run(tmp_path, full_rows()[:2], "running")
    run = json.loads((folder / "run.json").read_text()) | {"host": socket.gethostname()}
    (folder / "run.json").write_text(json.dumps(run))
    with (folder / "run.log").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the run itself has it
        assert "✗ killed" not in Page(write_report(folder)).text
    assert (
        "The run was killed after step 1 of 2: its process has ended without recording why, as after SIGKILL"
        in Page(write_report(folder)).text
    )
    (folder / "ranks").mkdir()
    status = {"rank": 0, "host": "a", "pid": 1, "phase": "train", "step": 2, "seconds": 1.0, "limit": 0.0}
    (folder / "ranks" / "rank_00000.json").write_text(json.dumps(status))
    log = folder / "ranks" / "rank_00001.log"
    log.write_text("rank 1 of 2: process 7 on a\nFatal Python error: Segmentation fault\nrank 1 of 2: process 8 on a\n")
    sentence = CliRunner().invoke(app, ["report", str(folder)]).stdout.splitlines()[1]
    assert sentence.startswith("The run was killed after step 1 of 2, in train of step 2: its process has ended without"), sentence
    log.write_text(log.read_text() + "Fatal Python error: Bus error\n")
    assert "train of step 2: its process crashed (Bus error; the stacks are in ranks/rank_00001.log)" in Page(write_report(folder)).text


def test_broken_run_is_shown_as_broken(tmp_path: Path):
    page = Page(write_report(make_run(tmp_path, full_rows()[:2], "broken", "engine died: signal 9")))
    assert "The run broke after step 1 of 2: engine died: signal 9" in page.text
    assert "Broken after step 1 of 2. Held-out accuracy was 40.0 % at step 0" in page.text
    assert "finished" not in page.text[page.text.index("✗ broken", page.text.index("@media print")) :]


def test_the_report_says_what_is_missing(tmp_path: Path):
    """The run has a sync without a full proof, a value that is not finite, and a torn line."""
    rows = full_rows()
    rows[1] |= {"loss/policy": None, "sync/proved": 3.0}
    run = make_run(tmp_path, rows)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rew')
    page = Page(write_report(run))
    assert "✗ failed" in page.text and "step 1: " in page.text and "all equal" not in page.text
    assert "loss/policy was not finite at step 1" in page.text
    assert "the last line (line 4) is torn" in page.text
    del rows[1]["sync/proved"]
    page = Page(write_report(make_run(tmp_path, rows)))
    assert "✗ missing" in page.text and "step 1: " in page.text and "all equal" not in page.text


def test_metrics_of_a_user_s_own_are_drawn_and_one_without_a_declaration_is_listed(tmp_path: Path):
    run = make_run(tmp_path, [{"step": step, "mine/gap": 0.5, "loss/mine": 1.0, "mine/other": 2.0} for step in (1, 2)])
    page = Page(write_report(run))
    assert "Further metrics" not in page.text and page.tags.count("svg") == 0 and "mine/other" in page.text
    state = json.loads((run / "run.json").read_text())
    state["metrics"] += [
        {"name": "mine/gap", "meaning": "how <far> KL is off", "unit": "share", "panels": ['<my> "panel"'], "label": "<gap>"},
        {"name": "loss/{}", "meaning": "my loss {}", "panels": ["policy loss"]},
    ]
    (run / "run.json").write_text(json.dumps(state))
    page = Page(write_report(run))
    assert "How <far> KL is off." in page.text and "my loss mine" in page.text and "50.0 %" in page.text
    assert page.tags.count("svg") == 2 and "<my>" not in page.source and "<gap>" not in page.source
    state["metrics"].append({"name": "other", "meaning": "", "color": "red"})  # from another version
    state["metrics"].append({"name": "color"})
    (run / "run.json").write_text(json.dumps(state))
    assert f"run.json: left out: metrics.{len(state['metrics']) - 1} (Field required)" in Page(write_report(run)).text


def test_a_run_without_declarations_shows_its_values_and_says_what_was_omitted(tmp_path: Path):
    run = make_run(tmp_path, full_rows())
    state = json.loads((run / "run.json").read_text())
    del state["metrics"]
    (run / "run.json").write_text(json.dumps(state))
    page = Page(write_report(run))
    assert "has no metric declarations" in page.text and "Not measured: " not in page.text
    assert page.tags.count("svg") == 0 and "length/truncated" in page.text and "Held-out accuracy rose" in page.text


def test_bad_folders_are_refused_and_few_rows_are_drawn(tmp_path: Path):
    with pytest.raises(UserError, match="RUN_DIR"):
        write_report(tmp_path / "absent")
    with pytest.raises(UserError, match=r"RUN_DIR.*run\.json"):
        write_report(tmp_path)
    assert not list(tmp_path.glob("report.html*"))
    page = Page(write_report(make_run(tmp_path, [{"reward/mean": 1.0}])))
    assert "metrics.jsonl: left out: line 1: all (its step is not the number of a step)" in page.text
    synced = {"step": 0, "eval/accuracy": 0.4, "sync/tensors": 4, "sync/proved": 4, "sync/bytes": 0.0, "time/sync": 0.1}
    for rows, drawings in (([], 0), ([synced], 3)):
        page = Page(write_report(make_run(tmp_path, rows, "running")))
        assert headline(rows) in page.text and "Not measured: " in page.text
        assert page.tags.count("svg") == drawings


def test_many_levels_or_sets_have_labels_of_their_own_and_long_runs_stay_small():
    for names in ([f"level_{level}" for level in range(1, 11)], [f"source_{letter}/test" for letter in "abcdefghij"]):
        rows = [{"step": step, **{f"eval/{name}": 0.1 * step for name in names}} for step in (0, 1)]
        plot = find_plot("Held-out accuracy by level or set", rows)
        labels = [name.replace("level_", "level ").removeprefix("source_") for name in names]
        assert [label for _, label in plot.panels[0].series] == labels  # level 10 comes after level 9
        assert all(label in render_svg(plot, rows) for label in labels)
    rows = [{"step": step, "reward/mean": math.sin(step), "time/generate": 1.0 + step % 3, "time/train": 2.0} for step in range(2000)]
    assert 0 < len(render_svg(find_plot("Reward", rows), rows)) < 300_000
    assert 0 < len(render_svg(find_plot("Time by phase", rows), rows)) < 500_000


def test_headlines_and_words():
    assert tuple(CAUSE_LABELS) == (*CAUSES, "total")
    rows = [{"step": 0, "eval/accuracy": 0.5}, {"step": 4, "eval/accuracy": 0.25}]
    assert headline(rows) == "Held-out accuracy fell from 50.0 % to 25.0 % over 4 steps."
    assert headline([rows[0], {**rows[0], "step": 1}]) == "Held-out accuracy stayed at 50.0 % over 1 step."
    assert headline([{"step": 3}]) == "No held-out accuracy was measured in 3 steps."
    assert [format_bytes(size) for size in (999, 3_213_312, 2.5e12)] == ["999 B", "3.21 MB", "2.5 TB"]
    assert [format_duration(seconds) for seconds in (59.4, 61, 3725)] == ["59 s", "1 min 01 s", "1 h 02 min"]
    assert format_toml({"a": {"b": None, "c": "x", "d": {"e": [1, 2]}}}) == '[a]\n# b is not set\nc = "x"\n\n[a.d]\ne = [1, 2]'
    assert visible("a\tb\n\x00\x9f\udc80é") == "a\tb\n\\x00\\x9f\\xdc80é"


def make_runs(parent: Path, **config: object) -> list[Path]:
    """Return two runs with different learning rates. `config` holds further fields of the second."""
    runs = []
    for number, name in enumerate(("first", "second")):
        (parent / name).mkdir()
        run = make_run(parent / name, [row | {"unix_time": 60.0 * row["step"]} for row in full_rows()])
        state = json.loads((run / "run.json").read_text())
        state["config"]["train"]["learning_rate"] = 1e-5 * (number + 1)
        state["config"] |= config if number else {}
        (run / "run.json").write_text(json.dumps(state))
        runs.append(run)
    return runs


def test_results_settings_and_curves_stand_side_by_side(tmp_path: Path):
    runs = make_runs(tmp_path)
    path = write_comparison(runs, None)
    page = Page(path)
    assert path == tmp_path / "comparison.html" and "2 runs: first, second" in page.text
    assert page.text.count("✓ finished") == 2 and page.text.count("40.0 % at first, best 80.0 %") == 2
    assert "train.learning_rate" in page.text and "2e-05" in page.text and "train.steps" not in page.text
    assert "Versions that differ" not in page.text and "Full config" not in page.text
    for plot in ("eval/accuracy", "eval/accuracy over time", "reward/mean", "mismatch/abs_mean", "time/step"):
        assert f"<code>{plot}</code>" in page.source, plot
    svg = page.source.split("<code>eval/accuracy</code>")[1].split("</svg>")[0]
    assert ">first<" in svg and ">second<" in svg
    assert all(target.startswith("#") for target in page.loads) and "script" not in page.tags


def test_hostile_settings_are_shown_not_obeyed(tmp_path: Path):
    page = Page(write_comparison(make_runs(tmp_path, name=HOSTILE), tmp_path / "page.html"))
    assert "script" not in page.tags and "<script>alert(1)</script>" in page.text


def test_a_run_that_has_just_begun_is_compared(tmp_path: Path):
    runs = make_runs(tmp_path)
    (runs[1] / "metrics.jsonl").write_text("")
    page = Page(write_comparison(runs, None))
    assert "eval/accuracy" in page.text and "not measured" in page.text


def test_mistakes_are_one_line(tmp_path: Path):
    first, second = make_runs(tmp_path)
    with pytest.raises(UserError, match="is named twice"):
        write_comparison([first, second, tmp_path / "x" / ".." / "first"], None)
    for arguments, line in (
        ([first, tmp_path], "holds no readable run.json"),
        ([first, second, "--output", tmp_path / "absent" / "page.html"], "--output"),
        ([first, "--output", "page.html"], "only applies to several runs"),
    ):
        result = CliRunner().invoke(app, ["report", *map(str, arguments)])
        assert result.exit_code == 2 and line in result.stderr, result.output
    result = CliRunner().invoke(app, ["report", str(first), str(second)])
    assert result.exit_code == 0 and (tmp_path / "comparison.html").exists()


def test_a_profile_is_on_the_report(tmp_path: Path):
    run = make_run(tmp_path, full_rows())
    (run / "profile").mkdir()
    operator = {"name": "aten::<mm>", "calls": 7, "device_ms": 0.0, "host_ms": 12.345}
    profile = {"step": 2, "rank": 1, "micro_batches": 4, "operators": [operator]}
    (run / "profile" / "step_00002_rank_00001.json").write_text(json.dumps(profile))
    result = CliRunner().invoke(app, ["report", str(run)])
    page = Page(run / "report.html")
    assert result.exit_code == 0 and "Profile of step 2, rank 1" in page.text and "aten::<mm>" in page.text and "12.35" in page.text
    assert "profile/step_00002_rank_00001.trace.json.gz" in page.text
