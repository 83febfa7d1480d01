"""Reads the README: the commands of the section Train by machine, and the code of the user's own functions."""

import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


class Job(NamedTuple):
    """A command of the section Train as other commands take it: the configuration, its options, and the ranks that it starts."""

    config: str
    options: list[str]
    ranks: int


def read_train_blocks() -> dict[str, list[str]]:
    """Return the commands of each machine, with continued lines joined. Raise AssertionError for a block of more than three lines."""
    section = README.split("## Train\n")[1].split("\n## ")[0]
    blocks = {}
    for title, text in re.findall(r"^(.*):\n\n((?:    .*\n)+)", section, re.MULTILINE):
        assert len(text.splitlines()) <= 3, text
        machine = next(each for each in ("laptop", "One GPU", "Eight GPUs", "SLURM") if each in title)
        blocks[machine] = [line.partition("   #")[0].strip() for line in text.replace("\\\n", " ").splitlines()]
    return blocks


def read_job(command: str, folder: Path) -> Job:
    """Return what a command trains. The config.json of a model on the hub comes from configs/published_models.jsonl and lies in
    `folder`, where the user's own code belongs, too."""
    words = shlex.split(command)
    start = next(number for number, word in enumerate(words) if word.startswith("configs/"))
    config, options, before = words[start], words[start + 1 :], words[:start]
    model = next((word.partition("=")[2] for word in options if word.startswith("--model.path=")), None)
    model = model or re.search(r'^path = "(.*)"', (ROOT / config).read_text(), re.MULTILINE)[1]
    if model.startswith("hf:"):
        lines = map(json.loads, (ROOT / "configs" / "published_models.jsonl").read_text().splitlines())
        fields = next(line["config"] for line in lines if line["model"] == model.removeprefix("hf:"))
        (folder / "config.json").write_text(json.dumps(fields))
        options = [*(word for word in options if not word.startswith("--model.path=")), f"--model.path={folder}"]
    return Job(config, options, _count_ranks(before))


def _count_ranks(words: list[str]) -> int:
    """Return the ranks that the words in front of a configuration start: torchrun's, those of a SLURM file, or one."""
    if "--nproc-per-node" in words:
        return int(words[words.index("--nproc-per-node") + 1])
    if words[0] != "sbatch":
        return 1
    text = (ROOT / words[-1]).read_text()
    nodes = next(word.partition("=")[2] for word in words if word.startswith("--nodes="))
    return int(nodes) * int(re.search(r"^#SBATCH --ntasks-per-node=(\d+)", text, re.MULTILINE)[1])


def write_own_code(folder: Path) -> None:
    """Write the functions of the section about the user's own reward and loss, each into the file that its first line names."""
    code = re.search(r"## Your own reward and loss\n.*?```python\n(.*?)```", README, re.DOTALL)[1]
    for text in re.split(r"(?=^# my_)", code, flags=re.MULTILINE)[1:]:
        (folder / re.match(r"# (my_\w+\.py)", text)[1]).write_text(text)
