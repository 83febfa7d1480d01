"""Writes the checkpoints of a run, and loads them into the ranks of a resumed run. `load.py` describes their content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_rl.distributed import gather_from_ranks, is_rank0, write_on_rank0
from megatron_rl.errors import RunError
from megatron_rl.hf.files import list_tokenizer_files
from megatron_rl.mcore.buckets import finish_gathers
from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.mcore.checkpoint.async_save import AsyncSave
from megatron_rl.mcore.checkpoint.optimizer import MasterState, OptimizerState
from megatron_rl.mcore.checkpoint.rng import restore_rng_state
from megatron_rl.mcore.layers.quantized_linear import find_quantized_layers, list_quantized_layers
from megatron_rl.mcore.names import ModelChunks, get_model_chunks
from megatron_rl.mcore.quantizing_optimizer import requantize


class CheckpointWriter:
    """Writes one checkpoint. The constructor returns when the tensors are copied; `finish` gives the folder its name. Collective.

    `state` must hold `precision` (the config's section) and may hold any other JSON; only rank 0's is written. `optimizer` and `random`
    (`capture_rng_state`) may be omitted; then no run can resume from it. `keep`: number of newest checkpoints to keep, 0 for all.
    Constructor and `finish` raise RunError on every rank where writing fails; earlier checkpoints stay as they are.
    """

    def __init__(
        self,
        folder: Path,
        model: ModelChunks,
        hf_config: dict[str, Any],
        tokenizer: Path,
        state: dict[str, Any],
        optimizer: Any = None,
        random: dict[str, Any] | None = None,
        keep: int = 0,
    ) -> None:
        self.folder, self._hf_config, self._tokenizer, self._state, self._keep = folder, hf_config, tokenizer, state, keep
        self._temporary = checkpoints.unfinished_folder(folder)
        sharded = _weights(model)
        chunks = [*sharded.values()]
        if optimizer is not None:
            optimizer_state = OptimizerState(optimizer, chunks)
            sharded["optimizer"] = optimizer_state.sharded_for_save()
            self._state = {**state, "adam_step": optimizer_state.step}
        sharded["masters"] = MasterState(list_quantized_layers(model), chunks).sharded_for_save()
        if random is not None:
            sharded["random"] = _rng_shard(random)
        with self._discarded_on_failure():
            write_on_rank0(self._prepare)
            self._async_save = AsyncSave(self._temporary, sharded)

    def is_written(self) -> bool:
        """Return whether `finish` will not have to wait; collective."""
        return self._async_save.is_written()

    def finish(self) -> None:
        """Wait until all is on the disk and give the folder its name; collective."""
        with self._discarded_on_failure():
            self._async_save.finish()
            files = gather_from_ranks(self._async_save.files)
            write_on_rank0(lambda: self._complete({name: checksum for part in files for name, checksum in part.items()}))

    @contextmanager
    def _discarded_on_failure(self) -> Iterator[None]:
        """Remove the unfinished folder where RunError is raised."""
        try:
            yield
        except RunError:
            if is_rank0():
                shutil.rmtree(self._temporary, ignore_errors=True)
            raise

    def _prepare(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        checkpoints.clear_unfinished(self.folder.parent)
        (self._temporary / "mcore").mkdir(parents=True)
        (self._temporary / "hf").mkdir()
        (self._temporary / "hf" / "config.json").write_text(json.dumps(self._hf_config, indent=2) + "\n")
        for file in list_tokenizer_files(self._tokenizer):
            shutil.copy(file, self._temporary / "hf" / file.name)

    def _complete(self, files: dict[str, dict[str, Any]]) -> None:
        others = [name for name in checkpoints.list_files(self._temporary) if name not in files]
        files |= checkpoints.checksum_files(self._temporary, others)
        checkpoints.write_state(self._temporary, {**self._state, "files": dict(sorted(files.items()))})
        checkpoints.publish(self._temporary, self.folder, self._keep)


def _weights(model: ModelChunks) -> dict[str, Any]:
    """Return the sharded state of each virtual pipeline stage. The keys are not written: layers are numbered over the whole model."""
    finish_gathers(model)
    return {f"model{number}": chunk.sharded_state_dict() for number, chunk in enumerate(get_model_chunks(model))}


def _load_weights(model: ModelChunks, loaded: dict[str, Any]) -> None:
    """Set what `dist_checkpointing.load` returned for `_weights`; quantized weights, whose masters are loaded, stay."""
    for number, chunk in enumerate(get_model_chunks(model)):
        quantized = {f"{name}.weight": layer.weight for name, layer in find_quantized_layers(chunk).items()}
        chunk.load_state_dict({**quantized, **loaded[f"model{number}"]})


def _rng_shard(random: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("random", random, (dist.get_world_size(),), (dist.get_rank(),))


def load_run_checkpoint(folder: Path, model: ModelChunks, optimizer: Any, state: dict[str, Any], same_layout: bool) -> None:
    """Load weights, masters and moments into this rank's part of the model, whatever layout wrote them; collective.

    With `same_layout`, random number generators are restored too. Layers that adopted an FP8 checkpoint's blocks keep them where the
    loaded master equals their values.
    """
    sharded = _weights(model)
    chunks = [*sharded.values()]
    optimizer_state, masters = OptimizerState(optimizer, chunks), MasterState(list_quantized_layers(model), chunks)
    sharded["optimizer"], sharded["masters"] = optimizer_state.sharded_for_load(), masters.sharded_for_load()
    if same_layout:
        sharded["random"] = _rng_shard(None)
    loaded = dist_checkpointing.load(sharded, str(folder / "mcore"))
    _load_weights(model, loaded)
    optimizer_state.load(loaded["optimizer"])
    optimizer_state.set_step(int(state["adam_step"]))
    masters.load(loaded["masters"])
    requantize(optimizer)
    if same_layout:
        restore_rng_state(loaded["random"])
