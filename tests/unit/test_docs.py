"""Pages hold against the tree: links, paths, tables, retired words and tools, the tree of architecture.md, and the table of recipes."""

import re
import subprocess
from pathlib import Path

import pytest
from test_layering import MAY_IMPORT, ORDER

from megatron_rl.config import load_config
from megatron_rl.rollout import engine

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for pattern in ("*.md", "[a-z]*/**/*.md") for page in ROOT.glob(pattern) if "runs" not in page.parts)
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole_and_commands_have_no_placeholder(page):
    """A blank line within a table shows its other rows as raw text. `git+URL` and the like cannot be run."""
    text = page.read_text()
    blocks = [block.splitlines() for block in re.sub(r"```.*?```", "", text, flags=re.DOTALL).split("\n\n")]
    tables = [lines for lines in blocks if lines[-1:] and re.fullmatch(r"\|.*\|", lines[-1])]
    headless = [lines[0] for lines in tables if not any(re.fullmatch(r"\|[-|: ]+\|", line) for line in lines)]
    assert not headless, f"a blank line splits this table: {headless}"
    for lines in tables:
        rows = [line for line in lines if line.startswith("|")]
        ragged = [line for line in rows if (line.count("|") - line.count("\\|")) != rows[0].count("|") - rows[0].count("\\|")]
        assert not ragged, ragged
    placeholder = r"git\+(?!https://)\w+|https?://(?:example|your)[\w.-]*|<(?:url|your)[\w-]*>"
    assert not (found := re.findall(placeholder, text, re.IGNORECASE)), found


def test_tools_of_old_commits_stand_in_one_table():
    page = ROOT / "docs" / "results" / "README.md"
    tools = dict(re.findall(r"^\| `([\w./]+)` \| ([0-9a-f]{7,10}) \|$", page.read_text(), re.MULTILINE))
    cited, elsewhere = set(), []
    for each in PAGES:
        text = each.read_text()
        elsewhere += [each.name for _ in re.findall(r"\b[0-9a-f]{7,10}:\w+[/.]", text)] if each != page else []
        cited |= {name.partition(" ")[0] for name in re.findall(r"\[`([^`]*)`\]\([\w./]*#retired-tools\)", text)}
    assert not elsewhere and cited == set(tools)
    if (ROOT / ".git").exists() and not git("rev-parse", "--is-shallow-repository").startswith("true"):
        assert [name for name, commit in tools.items() if not git("cat-file", "-t", f"{commit}:tools/{name}")] == []


def git(*words: str) -> str:
    """Return the output of a git command, empty if it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout


def test_the_tree_of_the_architecture_is_the_order_of_imports():
    """The tree lists the packages of megatron_rl from the last one to the first one."""
    lines = (ROOT / "docs" / "architecture.md").read_text().split("    megatron_rl/\n")[1].splitlines()
    packages = [line.split()[0].rstrip("/") for line in lines if line.startswith("      ") and not line.startswith("       ")]
    own = packages[: packages.index("config") + 1]
    assert own == [name for name in reversed(ORDER) if (ROOT / "megatron_rl" / name).is_dir()]
    top = {line.split("/")[0].strip() for line in lines if re.match(r"    \w+/", line)}
    assert top == MAY_IMPORT.keys() - {"megatron_rl"} | {"tests"}


def test_the_page_names_all_that_an_engine_must_offer():
    section = (ROOT / "docs" / "extending.md").read_text().split("## An engine\n")[1].split("\n## ")[0]
    methods = {name for name in vars(engine.Engine) if not name.startswith("_")}
    table = {name for line in section.splitlines() if line.startswith("|") for name in re.findall(r"`(\w+)`", line)}
    assert table == methods and f"has {len(methods)} methods" in section
    launcher = {name for name in vars(engine.EngineLauncher) if name in ("check", "serve", "__call__")}
    assert f"its launcher {len(launcher)}" in section


def test_the_table_of_recipes_matches_the_files():
    rows = re.findall(r"^\| \[`(\w+)`\]\((\w+)\.toml\) \| (.*) \|$", (ROOT / "configs" / "README.md").read_text(), re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(file.stem for file in (ROOT / "configs").glob("*.toml"))
    for name, file, row in rows:
        config = load_config(ROOT / "configs" / f"{file}.toml", [])
        layout, emulated = config.train.layout, config.precision.backend == "emulated"
        gpus = layout.tp * layout.cp * layout.pp * layout.dp
        _, machine, precision, _ = row.split(" | ")
        assert name == file and machine == ("two CPU cores" if emulated else f"{gpus} H100"), name
        assert precision == f"`{config.precision.mode}`" + ", emulated" * emulated, name


def test_every_page_is_in_the_order_of_reading():
    links = re.findall(r"\]\(([\w./]+\.md)\)", (ROOT / "docs" / "README.md").read_text())
    listed = {(ROOT / "docs" / link).resolve() for link in links}
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "results" and page.name != "README.md"}
    assert not (missing := sorted(str(page.relative_to(ROOT)) for page in pages - listed)), missing
    navigation = re.findall(r"([\w./]+\.md)$", (ROOT / "tools" / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(navigation) == len(set(navigation)) and {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")} <= set(
        navigation
    )


def test_lines_of_the_troubleshooting_page_stand_in_the_code():
    """Each fixed part of a quoted line must be found in a script, a source file, or a test, in which long texts may be split."""
    code = "\n".join(file.read_text() for file in list_texts() if file.suffix in (".py", ".sh"))
    code = re.sub(r"[\"']\s*\n\s*f?[\"']", "", code).replace("\\", "")
    lines = re.findall(r"^\| `(.*?)` \|", (ROOT / "docs" / "guides" / "troubleshooting.md").read_text(), re.MULTILINE)
    parts = {part.strip(): line for line in lines for part in line.split("...") if part.strip()}
    assert len(lines) > 25 and [line for part, line in parts.items() if part not in code] == []


def test_the_quickstart_names_all_recipes_whose_model_it_makes():
    names = re.search(r"^# NAME: (.*?)\.(?: |$)", (ROOT / "launch" / "quickstart.sh").read_text(), re.MULTILINE)[1]
    named = set(re.findall(r"\w+", names)) - {"default", "or"}
    assert named == {file.stem for file in (ROOT / "examples" / "arithmetic").glob("*.toml")}
    assert all((ROOT / "configs" / f"{name}.toml").is_file() for name in named)
