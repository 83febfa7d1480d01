"""A checkpoint that several ranks wrote is the same model in one process, and an incomplete checkpoint is refused."""

import errno
import json
import os
import random
import shutil
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from support import trainer
from support.fp8_checkpoints import add_mtp_layer
from support.models import FP8, make_model, random_sequences, read_weights
from support.trainer import Trainer, start
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_rl.errors import RunError, UserError
from megatron_rl.hf.files import read_config
from megatron_rl.mcore.checkpoint import export as exports
from megatron_rl.mcore.checkpoint.checkpointing import capture_rng_state, load_run_checkpoint
from megatron_rl.mcore.checkpoint.export import convert
from megatron_rl.mcore.checkpoint.run_weights import RunWeights, read_state
from parallel.layout import Coordinates, Layout
from parallel.megatron_shards import build_megatron_shards
from parallel.model_geometry import ModelGeometry

# Sequence parallelism, which experts need, cuts the batch's width: it is even with this seed.
EVEN = next(seed for seed in range(99) if max(sequence.length for sequence in random_sequences(4, seed)) % 2)
CASES = {
    "dense": Layout(tp=2),
    "tied": Layout(pp=2, dp=2),
    "qwen3_moe": Layout(dp=2, ep=2, pp=2),
    "deepseek_v3": Layout(tp=2),
    "glm4": Layout(tp=2),
    "qwen3_5_text": Layout(tp=2),
    "qwen3_next": Layout(tp=2, pp=2, ep=2, etp=1),
}
_FILE_BYTES = 1 << 17


def convert_run(run, to, full_at=""):
    """Export in the run's precision, in small files. Return the bytes of weights that this rank read, in total and of the largest.
    Writing a file whose name begins with `full_at` fails."""
    read, read_parameter, write = [], RunWeights._read, exports.write_file

    def watch(self, *place):
        tensor = read_parameter(self, *place)
        read.append(tensor.nbytes)
        return tensor

    def write_or_fail(path, *rest):
        if full_at and path.name.startswith(full_at):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *rest)

    start(Layout(dp=int(os.environ.get("WORLD_SIZE", "1"))))
    with mock.patch.object(RunWeights, "_read", watch), mock.patch.object(exports, "write_file", write_or_fail):
        exports.convert(run, to, {}, file_bytes=_FILE_BYTES)
    return sum(read), max(read)


def largest_parameter(run):
    """Return the bytes of the largest parameter of a run, in FP32."""
    model = ModelGeometry.from_hf_config(read_config(run / "hf"))
    return max(4 * shard.rows * shard.cols for shard in build_megatron_shards(model, Layout(), Coordinates()))


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("model, layout", CASES.items(), ids=CASES)
def test_one_process_reads_the_same_masters_and_blocks(worlds, checkpoint, tied_checkpoint, model_folder, tmp_path, model, layout):
    dense = {"dense": checkpoint, "tied": tied_checkpoint}
    start, folder = dense.get(model) or model_folder(model), tmp_path / "step_00001"
    saved = worlds(layout.world_size).call(trainer.save_checkpoint, start, FP8, random_sequences(4, EVEN), folder, layout)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00001"] and read_state(folder)[0]["step"] == 1
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
    alone, shared = ([*worlds(size).call(convert_run, run, tmp_path / str(size))] for size in (1, 2))
    files = {file.name: file.read_bytes() for file in (tmp_path / "1").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "2").iterdir()} and len(files) > 8
    assert sum(read for read, _ in shared) < 1.1 * alone[0][0] and max(read for read, _ in shared) < 0.6 * alone[0][0]
    assert max(largest for _, largest in (*alone, *shared)) <= largest_parameter(run)
    with pytest.raises(RunError, match=r"^No space left on device \(.*/model-00004-of-\d+\.safetensors\)$"):
        worlds(2).call(convert_run, run, tmp_path / "full", "model-00004")
    (run / "mcore" / ".metadata").unlink()
    with pytest.raises(UserError, match=r"step_00001': is damaged: mcore/\.metadata cannot be read"):
        worlds(2).call(convert_run, run, tmp_path / "torn")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "step_00001"]


def draw_after_start():
    """Return numbers of every generator of the process, which another run has left at other places, after a start."""
    torch.seed(), random.seed(), np.random.seed()
    trainer.leave_layout()
    start()
    tracked = capture_rng_state()["megatron"]
    return random.random(), float(np.random.rand()), float(torch.rand(())), {name: state.tolist() for name, state in tracked.items()}


def test_every_start_has_the_same_random_numbers(worlds):
    first, second = (worlds(1).call(draw_after_start)[0] for _ in range(2))
    assert first == second and first[2] == float(torch.rand((), generator=torch.Generator().manual_seed(0)))


def test_a_folder_that_is_not_whole_is_refused(tmp_path):
    for text in (None, '{"step": 1', '{"step": 1}', '{"step": 1, "precision": {"mode": "fp9"}}'):
        if text is not None:
            (tmp_path / "state.json").write_text(text)
        with pytest.raises(UserError, match="holds no state.json" if text is None else "cannot be read|is not valid JSON"):
            read_state(tmp_path)


OLD_RUN = Path(__file__).with_name("run_of_megatron_0.16.tar.xz")
"""A run's checkpoint that Megatron-Core 0.16.1 wrote, with its optimizer: a dense and a sparse layer, and a trained MTP layer, in FP8."""


def read_stored(folder):
    """Return all tensors that a run's checkpoint stores, by their names on disk."""
    reader = torch_checkpoint.FileSystemReader(folder / "mcore")
    stored = {name: each for name, each in reader.read_metadata().state_dict_metadata.items() if isinstance(each, TensorStorageMetadata)}
    tensors = {name: torch.empty(each.size, dtype=each.properties.dtype) for name, each in stored.items()}
    torch_checkpoint.load(tensors, storage_reader=reader, no_dist=True)
    return tensors


def load_and_save(source, run, to, layout):
    trainer = Trainer(source, FP8, {"mtp_loss_scaling_factor": 0.3}, layout=layout)
    load_run_checkpoint(run, trainer.model, trainer.actor.optimizer, json.loads((run / "state.json").read_bytes()), same_layout=False)
    trainer.save(to, with_optimizer=True)


@pytest.mark.parametrize("layout", [Layout(), Layout(pp=2), Layout(dp=2, ep=2)], ids=["one", "pp2", "dp2 ep2"])
def test_a_run_of_megatron_0_16_loads_and_has_the_same_weights_masters_and_moments(worlds, tmp_path, layout):
    shutil.unpack_archive(OLD_RUN, tmp_path)
    old, new = tmp_path / "step_00001", tmp_path / "step_00002"
    source = make_model(tmp_path / "source", read_config(old / "hf") | {"num_nextn_predict_layers": 0}, seed=1)
    add_mtp_layer(source)
    worlds(layout.world_size).call(load_and_save, source, old, new, layout)
    before, after = read_stored(old), read_stored(new)
    assert before.keys() == after.keys() and len(before) > 100
    assert [name for name in before if not torch.equal(as_bytes(before[name]), as_bytes(after[name]))] == []
