"""Saves a run's checkpoint and loads it into the ranks of a resumed run. `run_weights.py` describes the files."""

import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_rl.distributed import errors_on_all_ranks, gather_from_ranks, get_rank_and_size, is_rank0, write_on_rank0
from megatron_rl.errors import RunError, UserError
from megatron_rl.hf.mtp_layers import MTPCopy
from megatron_rl.hf.write import write_all_but_weights
from megatron_rl.mcore.base.names import ModelChunks, get_model_chunks
from megatron_rl.mcore.checkpoint import folder as checkpoints
from megatron_rl.mcore.checkpoint.async_save import AsyncSave, OtherFiles
from megatron_rl.mcore.checkpoint.optimizer import MasterState, OptimizerState, fill_in_place
from megatron_rl.mcore.layers.linear.quantized_linear import find_quantized_layers, list_quantized_layers
from megatron_rl.mcore.optim.buckets import finish_gathers
from megatron_rl.mcore.optim.quantizing_optimizer import requantize
from megatron_rl.mcore.weights.adapters import list_adapted_layers, shard_adapters

_CRITIC = "critic."  # prefix of the names of the critic's tensors


class CheckpointWriter:
    """Writes one checkpoint. The constructor returns once the tensors are copied; `finish` publishes the folder. Both are collective and
    raise RunError on every rank if writing fails; earlier checkpoints stay.

    Args:
        source: Hugging Face folder of the model; its MTP layers and all files but weights are copied.
        state: JSON with at least `precision`; only rank 0's is written.
        optimizer, rng_state: needed to resume from the checkpoint. `rng_state` is the result of `capture_rng_state`.
        keep: number of newest checkpoints to keep; 0 keeps all.
        critic: the critic's model and optimizer.
        files: further files that this rank writes.
    """

    def __init__(
        self,
        folder: Path,
        model: ModelChunks,
        hf_config: dict[str, Any],
        source: Path,
        state: dict[str, Any],
        optimizer: Any = None,
        rng_state: dict[str, Any] | None = None,
        keep: int = 0,
        critic: tuple[ModelChunks, Any] | None = None,
        files: Sequence[OtherFiles] = (),
    ) -> None:
        self.folder, self._hf_config, self._source, self._state, self._keep = folder, hf_config, source, state, keep
        self._temporary = checkpoints.unfinished_folder(folder)
        sharded, step, live = _shard_for_save(model, optimizer)
        if step is not None:
            self._state = {**self._state, "adam_step": step}
        if critic is not None:
            sharded["critic"], critic_step, of_critic = _shard_for_save(*critic, prefix=_CRITIC)
            live += of_critic
            self._state = {**self._state, "critic_adam_step": critic_step}
        if rng_state is not None:
            sharded["random"] = _shard_rng_state(rng_state)
        with self._discarded_on_failure():
            write_on_rank0(self._prepare)
            with errors_on_all_ranks():
                # with LoRA, MTP layers are in the base model; trained ones are in `mcore/`
                has_mtp_elsewhere = list_adapted_layers(model) or get_model_chunks(model)[0].config.trained_mtp_layers
                try:
                    copies = [] if has_mtp_elsewhere else [MTPCopy(source, hf_config, *get_rank_and_size())]
                except UserError as error:  # the folder was valid when the run started
                    raise RunError(str(error)) from None
            self._async_save = AsyncSave(self._temporary, sharded, live, [*copies, *files])

    def is_written(self) -> bool:
        """Return whether `finish` would return without waiting. Collective."""
        return self._async_save.is_written()

    def finish(self) -> None:
        """Wait until everything is on disk, then publish the folder. Collective."""
        with self._discarded_on_failure():
            self._async_save.finish()
            files = gather_from_ranks(self._async_save.files, dict[str, dict[str, int | str]])
            write_on_rank0(lambda: self._complete({name: checksum for part in files for name, checksum in part.items()}))

    @contextmanager
    def _discarded_on_failure(self) -> Iterator[None]:
        """Context manager that removes the unfinished folder on RunError."""
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
        try:
            write_all_but_weights(self._temporary / "hf", self._hf_config, self._source)
        except UserError as error:  # the folder was valid when the run started
            raise RunError(str(error)) from None

    def _complete(self, files: dict[str, dict[str, Any]]) -> None:
        others = [name for name in checkpoints.list_files(self._temporary) if name not in files]
        files |= checkpoints.checksum_files(self._temporary, others)
        checkpoints.write_state(self._temporary, {**self._state, "files": dict(sorted(files.items()))})
        checkpoints.publish(self._temporary, self.folder, self._keep)


def _shard_for_save(model: ModelChunks, optimizer: Any, prefix: str = "") -> tuple[dict[str, Any], int | None, list[torch.Tensor]]:
    """Return (sharded state, number of Adam steps or None without an optimizer, tensors that training will modify)."""
    sharded, step = _weights(model, prefix), None
    chunks = [*sharded.values()]
    live = [tensor.data for chunk in chunks for tensor in chunk.values() if isinstance(tensor.data, torch.Tensor)]
    if optimizer is not None:
        optimizer_state = OptimizerState(optimizer, chunks)
        sharded["optimizer"], step = optimizer_state.sharded_for_save(), optimizer_state.step
        live += optimizer_state.local_tensors().values()
    masters = MasterState(list_quantized_layers(model), chunks)
    sharded["masters"] = masters.sharded_for_save()
    return sharded, step, [*live, *masters.local_tensors().values()]


def _weights(model: ModelChunks, prefix: str) -> dict[str, Any]:
    """Return the sharded state of each virtual pipeline stage. Only the tensors' own names, with `prefix`, are written to disk; there
    layers are numbered over the whole model."""
    finish_gathers(model)
    sharded = {}
    for number, chunk in enumerate(get_model_chunks(model)):
        whole, adapters = chunk.sharded_state_dict(prefix=prefix), shard_adapters(chunk)
        if adapters:  # all other weights are those of the base model
            whole = {name: tensor for name, tensor in whole.items() if name.endswith(".kv_scales")} | adapters
        sharded[f"model{number}"] = {name.removeprefix(prefix): tensor for name, tensor in whole.items()}
    return sharded


def _load_weights(model: ModelChunks, loaded: dict[str, Any]) -> None:
    """Load the result of `dist_checkpointing.load` for `_weights`. Quantized weights are skipped; they are made from their masters."""
    for number, chunk in enumerate(get_model_chunks(model)):
        if list_adapted_layers(chunk):
            chunk.load_state_dict(loaded[f"model{number}"], strict=False)  # all other weights are those of the base model
            continue
        quantized = {f"{name}.weight": layer.weight for name, layer in find_quantized_layers(chunk).items()}
        chunk.load_state_dict({**quantized, **loaded[f"model{number}"]})


def capture_rng_state() -> dict[str, Any]:
    """Return a picklable copy of the states of a rank's random number generators."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "megatron": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
    }


def _restore_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["device"] is not None:
        torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["megatron"])


def _shard_rng_state(state: dict[str, Any] | None) -> ShardedObject:
    return ShardedObject("random", state, (dist.get_world_size(),), (dist.get_rank(),))


def load_run_checkpoint(
    folder: Path,
    model: ModelChunks,
    optimizer: Any,
    state: dict[str, Any],
    same_layout: bool,
    critic: tuple[ModelChunks, Any] | None = None,
) -> None:
    """Load weights, masters and moments into this rank's model, and into the critic's (model, optimizer), from any layout. Collective. With
    `same_layout`, random states are restored too. Layers that adopted an FP8 checkpoint's blocks keep them if the loaded master equals
    their values."""
    parts = [_LoadedPart("adam_step", "", model, optimizer)]
    if critic is not None:
        parts.append(_LoadedPart("critic_adam_step", _CRITIC, *critic))
    sharded: dict[str, Any] = {part.step: part.sharded for part in parts}
    if same_layout:
        sharded["random"] = _shard_rng_state(None)
    loaded = dist_checkpointing.load(sharded, str(folder / "mcore"))
    for part in parts:
        part.finish(loaded[part.step], int(state[part.step]))
    if same_layout:
        _restore_rng_state(loaded["random"])


class _LoadedPart:
    """One model and optimizer to load. `step` is the key of the number of Adam steps in state.json."""

    def __init__(self, step: str, prefix: str, model: ModelChunks, optimizer: Any) -> None:
        self.step, self._model, self._optimizer = step, model, optimizer
        self.sharded = _weights(model, prefix)
        chunks = [*self.sharded.values()]
        self._state, self._masters = OptimizerState(optimizer, chunks), MasterState(list_quantized_layers(model), chunks)
        self.sharded["optimizer"], self.sharded["masters"] = self._state.sharded_for_load(), self._masters.sharded_for_load()
        for weights in chunks:
            weights.update({name: fill_in_place(weight) for name, weight in weights.items()})
        self._has_masters = bool(self.sharded["masters"])

    def finish(self, loaded: dict[str, Any], step: int) -> None:
        """Load the result of `dist_checkpointing.load` for `sharded`. Collective."""
        _load_weights(self._model, loaded)
        self._state.load(loaded["optimizer"])
        self._state.set_step(step)
        self._masters.load(loaded["masters"] if self._has_masters else {})  # Megatron drops empty entries: LoRA runs have no masters
        requantize(self._optimizer)
