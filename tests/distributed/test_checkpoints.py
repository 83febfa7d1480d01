"""A checkpoint that two ranks wrote is the same model in one process; what is no whole checkpoint is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from support import trainer
from support.models import FP8, random_sequences, read_weights

from megatron_rl.errors import UserError


@pytest.fixture(scope="module", params=["checkpoint", "tied_checkpoint"])
def saved(request, two, tmp_path_factory):
    """(folder, what rank 0 of two held when it was written, the model's first weights)."""
    start, folder = request.getfixturevalue(request.param), tmp_path_factory.mktemp("run") / "step_00001"
    held = two.call(trainer.save_checkpoint, start, FP8, random_sequences(4, seed=1), folder)[0]
    return folder, held, read_weights(start)


def test_load_alone_gives_the_same_masters_and_blocks(saved, one):
    folder, held, first = saved
    assert not torch.equal(held["masters"]["model.norm.weight"], first["model.norm.weight"])  # it was trained
    loaded = one.call(trainer.load_checkpoint_alone, folder)[0]
    for part, tensors in held.items():
        assert loaded[part].keys() == tensors.keys()
        different = [name for name in tensors if not torch.equal(loaded[part][name], tensors[name])]
        assert different == [], part


def test_a_folder_that_is_not_whole_is_refused(saved, tmp_path):
    from megatron_rl.mcore.checkpoint.load import read_state

    folder, _, _ = saved
    assert read_state(folder)[0]["step"] == 1
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]  # no unfinished folder is left
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    for text, rule in ((None, "holds no state.json"), ('{"step": 1', "cannot be read"), ('{"step": 1}', "cannot be read")):
        (half / "state.json").unlink()
        if text is not None:
            (half / "state.json").write_text(text)
        with pytest.raises(UserError, match=rule):
            read_state(half)
        (half / "state.json").write_text(json.dumps({"step": 1, "precision": {"mode": "fp9"}}))
    with pytest.raises(UserError, match="cannot be read"):
        read_state(half)
