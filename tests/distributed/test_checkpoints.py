"""A checkpoint that several ranks wrote is the same model in one process; what is no whole checkpoint is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from support import trainer
from support.models import FP8, random_sequences, read_weights

from megatron_rl.errors import UserError
from megatron_rl.mcore.checkpoint.load import read_state
from parallel.layout import Layout

# Sequence parallelism, which experts need, cuts the batch's width: it is even with this seed.
EVEN = next(seed for seed in range(99) if max(sequence.length for sequence in random_sequences(4, seed)) % 2)
CASES = {
    "dense": Layout(tp=2),
    "tied": Layout(pp=2, dp=2),
    "qwen3_moe": Layout(dp=2, ep=2, pp=2),
    "deepseek_v3": Layout(tp=2),
    "glm4": Layout(tp=2),
}


@pytest.mark.parametrize("model, layout", CASES.items(), ids=CASES)
def test_load_alone_gives_the_same_masters_and_blocks(worlds, checkpoint, tied_checkpoint, model_folder, tmp_path, model, layout):
    dense = {"dense": checkpoint, "tied": tied_checkpoint}
    start, folder = dense.get(model) or model_folder(model), tmp_path / "step_00001"
    saved = worlds(layout.world_size).call(trainer.save_checkpoint, start, FP8, random_sequences(4, EVEN), folder, layout)[0]
    assert not torch.equal(saved["masters"]["model.norm.weight"], read_weights(start)["model.norm.weight"]), "it was trained"
    loaded = worlds(1).call(trainer.load_checkpoint_alone, folder)[0]
    for part, tensors in saved.items():
        assert loaded[part].keys() == tensors.keys()
        assert [name for name in tensors if not torch.equal(loaded[part][name], tensors[name])] == [], part


def test_a_folder_that_is_not_whole_is_refused(worlds, checkpoint, tmp_path):
    folder, half = tmp_path / "run" / "step_00001", tmp_path / "half"
    worlds(1).call(trainer.save_checkpoint, checkpoint, FP8, random_sequences(4, seed=1), folder)
    assert read_state(folder)[0]["step"] == 1
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]  # no unfinished folder is left
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
