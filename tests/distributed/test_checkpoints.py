"""A checkpoint that several ranks wrote is the same model in one process, and an incomplete checkpoint is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from support import trainer
from support.models import FP8, random_sequences, read_weights

from megatron_rl.errors import RunError, UserError
from megatron_rl.mcore.checkpoint.run_weights import read_state
from megatron_rl.mcore.weights.export import convert
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


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("model, layout", CASES.items(), ids=CASES)
def test_one_process_reads_the_same_masters_and_blocks(worlds, checkpoint, tied_checkpoint, model_folder, tmp_path, model, layout):
    dense = {"dense": checkpoint, "tied": tied_checkpoint}
    start, folder = dense.get(model) or model_folder(model), tmp_path / "step_00001"
    saved = worlds(layout.world_size).call(trainer.save_checkpoint, start, FP8, random_sequences(4, EVEN), folder, layout)[0]
    assert not torch.equal(saved["masters"]["model.norm.weight"], read_weights(start)["model.norm.weight"]), "it was trained"
    for part, precision in (("masters", {"mode": "bf16", "high": "fp32"}), ("blocks", {})):
        convert(folder, tmp_path / part, precision)
        loaded, tensors = read_weights(tmp_path / part), saved[part]
        assert loaded.keys() == tensors.keys()
        assert [name for name in tensors if not torch.equal(as_bytes(loaded[name]), as_bytes(tensors[name]))] == [], part


def test_ranks_share_an_export_of_the_same_files_and_end_together_where_one_cannot_write(worlds, model_folder, tmp_path):
    """No rank reads weights of other ranks' files, or holds more than one parameter at a time."""
    run = tmp_path / "step_00001"
    worlds(4).call(trainer.save_checkpoint, model_folder("qwen3_moe"), FP8, random_sequences(4, EVEN), run, Layout(dp=2, ep=2, pp=2))
    alone, shared = ([*worlds(size).call(trainer.convert_run, run, tmp_path / str(size))] for size in (1, 2))
    files = {file.name: file.read_bytes() for file in (tmp_path / "1").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "2").iterdir()} and len(files) > 8
    assert sum(read for read, _ in shared) < 1.1 * alone[0][0] and max(read for read, _ in shared) < 0.6 * alone[0][0]
    assert max(largest for _, largest in (*alone, *shared)) <= trainer.largest_parameter(run)
    with pytest.raises(RunError, match=r"^No space left on device \(.*/model-00004-of-\d+\.safetensors\)$"):
        worlds(2).call(trainer.convert_run, run, tmp_path / "full", "model-00004")
    (run / "mcore" / ".metadata").unlink()
    with pytest.raises(UserError, match=r"step_00001': is damaged: mcore/\.metadata cannot be read"):
        worlds(2).call(trainer.convert_run, run, tmp_path / "torn")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "step_00001"]


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
