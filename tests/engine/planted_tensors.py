"""The engine's process with one wrong tensor at a time: `python -m planted_tensors`.

The file that `FILE_VARIABLE` names holds the current fault as JSON, {"path": PATH, "change": NAME, ...}; without the file there is none. A
fault is planted before the next forward pass and undone when another takes its place.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

from rollout_sglang import launch_args, server
from rollout_sglang.process import EngineProcess

FILE_VARIABLE = "MEGATRON_RL_TEST_TENSOR_FAULT_FILE"


def launch_planted(file):
    """Let this process start engines that read `file`."""
    os.environ |= {FILE_VARIABLE: str(file), "PYTHONPATH": os.pathsep.join(sys.path)}
    launch_args.EngineProcess = partial(EngineProcess, module="planted_tensors")


def set_fault(file, fault=None):
    """Plant a fault from now on, or none."""
    if fault is None:
        file.unlink(missing_ok=True)
    else:
        file.with_suffix(".new").write_text(json.dumps(fault))
        file.with_suffix(".new").replace(file)


def _flip(tensor, at, bit=0):
    row = tensor[tuple(at[:-1])] if len(at) > 1 else tensor
    row.view(torch.uint8)[at[-1] * tensor.element_size() + (2 if tensor.dtype == torch.float32 else 0)] ^= 1 << bit


def _swap(tensor, first, second, count=1):
    rows = tensor[first : first + count].clone()
    tensor[first : first + count] = tensor[second : second + count].clone()
    tensor[second : second + count] = rows


CHANGES = {"flip": _flip, "swap": _swap, "multiply": lambda tensor, at, by: tensor[tuple(at)].mul_(by)}


class Planter:
    """The fault of this process."""

    def __init__(self):
        self.fault, self.saved = None, []

    def forward(self, original, runner, batch, *args, **named):
        file = Path(os.environ[FILE_VARIABLE])
        fault = json.loads(file.read_text()) if file.exists() else None
        rank = runner._weight_checker._placement["tp_rank"]
        if fault != self.fault:
            self._undo()
            self.fault = fault
            if fault is not None and fault.get("rank", rank) == rank and fault["path"] != "cache":
                if "float_copy" in fault:  # which the first pass makes
                    original(runner, batch, *args, **named)
                self._plant(runner.model, **{name: value for name, value in fault.items() if name != "rank"})
        if fault is not None and fault["path"] == "cache" and batch.forward_mode.is_decode():
            runner.token_to_kv_pool.get_key_buffer(fault["layer"]).view(torch.uint8).zero_()
        return original(runner, batch, *args, **named)

    def _undo(self):
        from rollout_sglang.hooks import dequant_cache

        for tensor, values in self.saved:
            tensor.copy_(values)
        self.saved = []
        dequant_cache.clear_cache()

    def _plant(self, model, path, change, float_copy=False, **where):
        from rollout_sglang.hooks import dequant_cache

        for each in path.split("+"):
            *parents, name = each.split(".")
            owner = model.get_submodule(".".join(parents))
            tensor = getattr(owner, name).detach()
            if float_copy:  # of a weight that the model has used
                tensor = dequant_cache._values[tensor.data_ptr()][0]
            self.saved.append((tensor, tensor.clone()))
            target = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
            CHANGES[change](target, **where)
        if not float_copy:
            dequant_cache.clear_cache()


def plant():
    """Install the planter in this process, which SGLang's processes are forked from."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    from rollout_sglang.hooks import registry

    registry.verify()
    planter, original = Planter(), ModelRunner.forward
    ModelRunner.forward = lambda *args, **named: planter.forward(original, *args, **named)


if __name__ == "__main__":
    plant()
    server.main(sys.argv[1:])
