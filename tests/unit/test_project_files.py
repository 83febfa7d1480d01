"""The files that a project shows to others agree with the code: CI, hooks before a commit, citation, changelog, and pins of the site."""

import re
import tomllib
from pathlib import Path

import yaml

import megatron_rl

ROOT = Path(__file__).parents[2]
VERSION = megatron_rl.__version__


def read(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_workflow_runs_the_command_of_ci_on_the_oldest_supported_python():
    jobs = yaml.safe_load(read(".github/workflows/ci.yml"))["jobs"]
    steps = jobs["tests"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111 and read(".ci/run").splitlines()[-1] == "exec bash tools/test.sh"
    (python,) = [step["with"]["python-version"] for step in steps if "setup-python" in step.get("uses", "")]
    assert tomllib.loads(read("pyproject.toml"))["project"]["requires-python"].startswith(f">={python}")
    commands = [step["run"].split() for job in jobs.values() for step in job["steps"] if "run" in step]
    assert all((ROOT / word).is_file() for words in commands for word in words if "/" in word) and len(commands) == 3


def test_hooks_before_a_commit_run_the_tools_of_ci():
    (repository,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    for hook in repository["hooks"]:
        python, *words = hook["entry"].removesuffix(" --force-exclude").split()
        assert python == ".venv/bin/python" and re.search(r"^\$python " + " ".join(words) + r"\b", read("tools/test.sh"), re.MULTILINE)


def test_citation_and_changelog_name_this_version():
    citation, project = yaml.safe_load(read("CITATION.cff")), tomllib.loads(read("pyproject.toml"))["project"]
    assert (citation["version"], citation["license"], citation["title"]) == (VERSION, project["license"], project["name"])
    titles = re.findall(r"^## (.*)$", read("CHANGELOG.md"), re.MULTILINE)
    assert titles[0] == "What 0.x promises" and VERSION in titles


def test_the_pins_of_the_site_are_exact():
    pins = read("launch/requirements-docs.txt").splitlines()
    assert any(pin.startswith("mkdocs-material==") for pin in pins) and all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)


def test_pages_ask_for_the_disk_space_that_the_scripts_check():
    run = int(re.search(r"check_disk \"\$\{MEGATRON_RL_MIN_DISK_MB:-(\d+)\}\"", read("launch/setup.sh"))[1])
    tests = int(re.search(r"check_disk (\d+) ", read("tools/test.sh"))[1])
    assert f"{run / 1000:.0f} GB of disk" in read("README.md")
    assert f"{(run + tests) / 1000:.0f} GB of disk" in read("CONTRIBUTING.md")
