"""README and docs hold against the code: links, paths, commands, the table of models, and words that were retired."""

import json
import re
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from support.families import ENGINE_ARCHITECTURES
from typer.main import get_command

from megatron_rl.cli.main import app
from megatron_rl.config import load_config
from parallel.families import FAMILIES
from parallel.formats import FP8, INT8, MODES
from parallel.model_geometry import ModelGeometry
from parallel.wrappers import unwrap

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]
README = PAGES[0].read_text()
CODE = [ROOT / name for name in ("megatron_rl", "rollout_sglang", "parallel", "tools", "launch", "examples", "configs", "tests")]
RETIRED = {
    r"\b(de)?quantis\w+": "quantize",
    r"\bnormalis\w+|\binitialis\w+|\boptimis\w+|\brandomis\w+|\bsynchronis\w+": "the American spelling, -ize",
    r"\bbehaviour|\bneighbour|\bcolour|\blicence\b": "the American spelling",
    r"\bbreaks RL\b": "destabilizes training",
    r"bytes, not numbers": "the blocks, unchanged",
    r"packages at second hand": "transitive dependencies",
    r"a GPU without a GPU": "a rehearsal without a GPU",
    r"\b_STILL\b|\b_LEAP\b|\b_MOVED\b|\bWORTH_IT\b": "a name that says what it is",
    r"made again": "recomputed",
    r"in vain": "needlessly",
}


def list_texts() -> list[Path]:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    suffixes = (".py", ".md", ".toml", ".sh", ".j2", ".sbatch", ".txt", ".in", ".cpp")
    return [ROOT / name for name in tracked if name.endswith(suffixes) and name != "tests/unit/test_docs.py" and (ROOT / name).is_file()]


def test_retired_words_are_gone():
    found = []
    for file in list_texts():
        text = file.read_text()
        for pattern, better in RETIRED.items():
            found += [f"{file.relative_to(ROOT)}: {match[0]!r}: write {better}" for match in re.finditer(pattern, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_exist(page):
    text = page.read_text()
    targets = [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?:|mailto:", target)]
    missing = [target for target in targets if target.partition("#")[0] and not (page.parent / target.partition("#")[0]).exists()]
    for target in targets:
        file, _, anchor = target.partition("#")
        goal = page.parent / file if file else page
        if anchor and goal.suffix == ".md" and goal.exists():
            headings = re.findall(r"^#+ (.*)$", goal.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            missing += [target] * (anchor not in anchors)
    for path in re.findall(r"`((?:megatron_rl|rollout_sglang|parallel|tools|launch|examples|tests|configs)/[\w./{},-]*)`", text):
        names = re.match(r"(.*)\{(.*)\}(.*)", path)
        paths = [names[1] + name + names[3] for name in names[2].split(",")] if names else [path]
        missing += [each for each in paths if not (ROOT / each).exists()]
    assert not missing, missing


def test_the_readme_is_short_and_its_commands_and_config_work(tmp_path):
    assert len(README.splitlines()) <= 130
    block = re.search(r"```toml\n(.*?)```", README, re.DOTALL)[1]
    assert len(block.splitlines()) <= 15
    (tmp_path / "my.toml").write_text(block)
    assert load_config(tmp_path / "my.toml", []).precision.mode == "fp8_unified"
    commands = set(get_command(app).commands)
    named = re.search(r"More commands: (.*?)\n\n", README, re.DOTALL)[1]
    assert set(re.findall(r"`(\w+)`", named)) | {"train"} == commands


def read_table(title: str) -> list[list[str]]:
    section = README.split(f"## {title}\n")[1]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    end = next((number for number, (one, other) in enumerate(pairwise(lines), 1) if other.count("|") != one.count("|")), len(lines))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:end] if not line.startswith("|---")]


def test_the_table_of_models_matches_the_code():
    head, *rows = read_table("Models and precision modes")
    assert set(re.findall(r"`(\w+)`", " ".join(head))) == set(MODES)
    families = {re.search(r"`(\w+)`", row[0])[1]: row for row in rows}
    assert set(families) == set(FAMILIES) == set(ENGINE_ARCHITECTURES)  # test_family_engines.py runs every family of the last
    refuses_fp8 = {name for name, row in families.items() if row[1:3] == ["CPU exact, `bf16` only", ""]}
    assert all(row[1] == "CPU exact" for name, row in families.items() if name not in refuses_fp8)
    refuses_int8 = refuses_fp8 | {name for name, row in families.items() if row[2] == "FP8 only"}
    models = {name: ModelGeometry.from_hf_config(ENGINE_ARCHITECTURES[name]) for name in families}
    for format, refusing in ((FP8, refuses_fp8), (INT8, refuses_int8)):
        assert refusing == {name for name, model in models.items() if any(kind.refuse_engine_format(format) for kind in model.attention)}
    shipped = re.findall(r'\("(\w+)", \[\d', (ROOT / "tests" / "rehearsal" / "test_shipped.py").read_text())
    folders = [re.search(r'^path = "(.*)"', (ROOT / "configs" / f"{name}.toml").read_text(), re.MULTILINE)[1] for name in shipped]
    configs = [unwrap(json.loads((ROOT / folder / "config.json").read_text())) for folder in folders]
    rehearsed = {config["model_type"] for config in configs} | {"llama", "glm4_moe", "deepseek_v3"}  # tests/rehearsal/test_other_models.py
    assert {name for name, row in families.items() if row[3]} == rehearsed
    measured = {name for name, row in families.items() if row[4]}
    assert not measured or list((ROOT / "benchmarks").glob("*/*.json"))
