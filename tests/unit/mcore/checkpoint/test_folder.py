"""The folder of a run's checkpoints: damage is found, and only the newest checkpoints are kept."""

import json
from pathlib import Path

import pytest

from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.training.resume import find_newest_whole


def make(run: Path, step: int, keep: int = 0) -> Path:
    folder = checkpoints.checkpoint_folder(run, step)
    hidden = checkpoints.unfinished_folder(folder)
    (hidden / "mcore").mkdir(parents=True)
    (hidden / "mcore" / "__0_0.distcp").write_bytes(bytes(range(256)) * 9)
    (hidden / "mcore" / ".metadata").write_bytes(b"metadata")
    files = checkpoints.checksum_files(hidden, checkpoints.list_files(hidden))
    counts = {"policy_version": step, "optimizer_steps": 20, "adam_step": 20, "data": {"position": 80, "left_out": [71]}}
    checkpoints.write_state(hidden, {"step": step, **counts, "files": files})
    checkpoints.publish(hidden, folder, keep)
    return folder


def edit(folder: Path, resign: bool = False, **fields) -> None:
    """Change fields of state.json. Its digest then fails; with `resign`, it is replaced, as in a state that was written wrong."""
    path = folder / "state.json"
    state = json.loads(path.read_text()) | fields
    if resign:
        checkpoints.write_state(folder, state)
    else:
        path.write_text(json.dumps(state))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "a truncated file": (lambda f: (f / "mcore/__0_0.distcp").write_bytes(b"x" * 100), "mcore/__0_0.distcp has 100 bytes instead of 2,304"),
    "a flipped bit": (lambda f: flip(f / "mcore/__0_0.distcp"), "mcore/__0_0.distcp was modified after it was written"),
    "a missing file": (lambda f: (f / "mcore/.metadata").unlink(), "mcore/.metadata cannot be read (No such file or directory)"),
    "no state.json": (lambda f: (f / "state.json").unlink(), "holds no state.json"),
    "half a state.json": (lambda f: (f / "state.json").write_text('{"step": 5, "fi'), "state.json cannot be read (JSONDecodeError)"),
    "a state without files": (lambda f: (f / "state.json").write_text('{"step": 5}'), "state.json cannot be read (KeyError)"),
    "a flipped digit of the position": (
        lambda f: edit(f, data={"position": 90, "left_out": [71]}),
        "state.json was modified after it was written",
    ),
    "a flipped digit of the steps": (lambda f: edit(f, optimizer_steps=21), "state.json was modified after it was written"),
    "no files": (lambda f: edit(f, files={}), "state.json does not list mcore/.metadata"),
    "files that are a list": (lambda f: edit(f, files=[]), "state.json does not list mcore/.metadata"),
    "files without hashes": (
        lambda f: edit(f, files={"mcore/.metadata": {}, "mcore/__0_0.distcp": 1}),
        "state.json has no size and hash of 'mcore/.metadata' (KeyError)",
    ),
    "a file outside": (
        lambda f: edit(f, files={"mcore/.metadata": {}, "mcore/__0_0.distcp": {}, "../x": {}}),
        "state.json lists '../x', which is not a file of this folder",
    ),
    "the step of another folder": (lambda f: edit(f, True, step=7), "state.json has step 7, but the folder's name is step_00005"),
    "another optimizer's steps": (
        lambda f: edit(f, True, adam_step=21),
        "state.json has optimizer_steps 20, but the optimizer took 21",
    ),
    "a position before what it left out": (
        lambda f: edit(f, True, data={"position": 60, "left_out": [71]}),
        "state.json has a position in the data that is not a number of problems, or problems after it",
    ),
    "a state nested too deep": (
        lambda f: (f / "state.json").write_text("[" * 100_000),
        "state.json cannot be read (RecursionError)",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_described(tmp_path, damage):
    whole, torn = make(tmp_path, 4), make(tmp_path, 5)
    assert find_newest_whole(tmp_path) == (torn, {})
    tear, reason = DAMAGE[damage]
    tear(torn)
    assert find_newest_whole(tmp_path) == (whole, {torn: reason})
    tear(whole)
    assert find_newest_whole(tmp_path)[0] is None


def test_the_newest_checkpoints_are_kept_and_unfinished_ones_removed(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, step, keep=2)
    assert [folder.name for folder in checkpoints.list_newest_first(tmp_path)] == ["step_00003", "step_00002"]
    for step in (99_999, 100_000):
        make(tmp_path, step)
    assert [folder.name for folder in checkpoints.list_newest_first(tmp_path)] == ["step_100000", "step_99999", "step_00003", "step_00002"]
    (tmp_path / "checkpoints" / ".step_00004.unfinished").mkdir()
    assert len(checkpoints.list_newest_first(tmp_path)) == 4
    checkpoints.clear_unfinished(tmp_path / "checkpoints")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir())[0] == "step_00002"
    assert checkpoints.list_newest_first(tmp_path / "nowhere") == []


def test_a_damaged_checkpoint_that_is_set_aside_is_not_counted(tmp_path):
    torn = make(tmp_path, 5)
    aside = checkpoints.set_aside(torn)
    assert aside.name == "step_00005.torn" and checkpoints.list_newest_first(tmp_path) == []
    assert make(tmp_path, 4, keep=1).exists() and make(tmp_path, 5, keep=1).exists()
    assert sorted(path.name for path in torn.parent.iterdir()) == ["step_00005", "step_00005.torn"]
