"""`bash tools/docs.sh` builds the static site of all pages, and a link that does not resolve fails it."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A copy of the pages and of what they link to, which a test may change."""
    folder = tmp_path_factory.mktemp("site") / "clone"
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("not a git repository")
    for name in done.stdout.split():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "VENV": str(folder.parent / "venv")}
    return subprocess.run(["bash", "tools/docs.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_all_links_resolve_and_the_site_can_be_searched(clone):
    done = build(clone)
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("megatron-rl docs: built "), done.stderr
    site = clone / "build" / "site"
    pages = [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md")]
    assert all((site / page.with_name(page.name.replace("README.md", "index.md")).with_suffix(".html")).is_file() for page in pages)
    found = {entry["location"] for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    assert {"index.html", "docs/guides/data.html", "docs/reference/sync.html#proof"} <= found
    assert 'class="mermaid"' in (site / "index.html").read_text()


@pytest.mark.parametrize("link", ["guides/absent.md", "guides/data.md#absent", "../megatron_rl/absent.py"])
def test_a_broken_link_fails_the_build(clone, link):
    page = clone / "docs" / "planted.md"
    page.write_text(f"# Planted\n\n[link]({link})\n")
    done = build(clone)
    page.unlink()
    assert done.returncode == 1 and "docs/planted.md" in done.stderr and link.partition("#")[0] in done.stderr, done.stderr
