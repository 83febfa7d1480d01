"""The engine's process with one wrong tensor at a time: `python -m planted_tensors`.

The file that `FILE_VARIABLE` names holds the current fault as JSON, {"path": PATH, "change": NAME, ...}; without the file there is none. A
fault is planted before the next forward pass, or, with "when": "update", in every sync between its bytes and its proof. It is undone when
another takes its place.
"""

import copy
import json
import os
import sys
from functools import partial
from pathlib import Path

import torch

from rollout_sglang import launch_args, server
from rollout_sglang.hooks import adapters
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


def _requantize(tensor):
    tensor.copy_(tensor.to(torch.float8_e4m3fn))


def _round_scales(tensor):
    tensor.copy_(torch.exp2(tensor.log2().ceil()))


CHANGES = {
    "flip": _flip, "swap": _swap, "multiply": lambda tensor, at, by: tensor[tuple(at)].mul_(by), "requantize": _requantize,
    "round scales": _round_scales,
}  # fmt: skip
"""Changes of the bytes of a tensor; those of `Planter._change_update` are more than that."""


def _read_fault():
    file = Path(os.environ[FILE_VARIABLE])
    return json.loads(file.read_text()) if file.exists() else None


def _spoil(output):
    if hasattr(output, "topk_weights"):
        return output._replace(topk_weights=output.topk_weights * 2)
    return (output[0] * torch.nan, *output[1:])


class Planter:
    """The fault of this process."""

    def __init__(self):
        self.fault, self.saved, self.old, self.undo, self.wrapped = None, [], {}, [], None

    def connect(self, original, *args):
        """Wrap RankHandler._connect: end what is more than wrong bytes, which the next sync overwrites."""
        while self.undo:
            self.undo.pop()()
        return original(*args)

    def start_update(self, original, receiver, live, *args):
        """Wrap WeightReceiver.start: keep the old version's values."""
        self.old = {name: tensor.clone() for name, tensor in live.items()}
        return original(receiver, live, *args)

    def finish_update(self, original, model):
        """Wrap the last thing that our code does between the bytes and SGLang's hooks."""
        original(model)
        fault = _read_fault()
        if fault and fault.get("when") == "update":
            self._change_update(model, **{name: value for name, value in fault.items() if name != "when"})

    def _change_update(self, model, path, change, **where):
        for each in path.split("+"):
            parent, _, name = each.rpartition(".")
            owner = model.get_submodule(parent)
            match change:
                case "keep":  # rows of the old version
                    rows = slice(*where["rows"])
                    getattr(owner, name).detach()[rows] = self.old[each][rows]
                case "copy":  # the kernel gets a copy of the old version
                    setattr(owner, f"{name}_swizzled", self.old[each])
                    self.undo.append(partial(delattr, owner, f"{name}_swizzled"))
                case "untie":  # the output layer gets a parameter of its own
                    self.undo.append(partial(setattr, model, "lm_head", owner))
                    model.lm_head = copy.copy(owner)
                    model.lm_head._parameters = {name: torch.nn.Parameter(self.old[each], requires_grad=False)}
                case "move":
                    tensor = getattr(owner, name)
                    self.undo.append(partial(setattr, tensor, "data", tensor.detach()))
                    tensor.data = tensor.detach().clone()
                case "set":
                    self.undo.append(partial(setattr, owner, name, getattr(owner, name)))
                    setattr(owner, name, where["value"])
                case "twice":  # every adapter, without a wrong byte
                    settings = adapters.read_settings()
                    self.undo.append(partial(settings.update, scale=settings["scale"]))
                    settings["scale"] *= 2
                case _:
                    tensor = getattr(owner, name).detach()
                    CHANGES[change](tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor, **where)

    def forward(self, original, runner, batch, *args, **named):
        fault = _read_fault()
        if fault and fault.get("when") == "update":
            fault = None
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

        if self.wrapped is not None:
            del self.wrapped.forward
            self.wrapped = None
        for tensor, values in self.saved:
            tensor.copy_(values)
        self.saved = []
        dequant_cache.clear_cache()

    def _plant(self, model, path, change="", float_copy=False, module="", **where):
        from rollout_sglang.hooks import dequant_cache

        if path == "operator":  # without a wrong tensor: its result is not finite, or experts get twice their weights
            self.wrapped = model.get_submodule(module)
            right = self.wrapped.forward
            self.wrapped.forward = lambda *args, **named: _spoil(right(*args, **named))
            return
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

    from rollout_sglang import rank_handler
    from rollout_sglang.hooks import registry
    from rollout_sglang.weight_receiver import WeightReceiver

    registry.verify()
    planter, forward, start, refresh = Planter(), ModelRunner.forward, WeightReceiver.start, rank_handler.refresh
    connect = rank_handler.RankHandler._connect
    ModelRunner.forward = lambda *args, **named: planter.forward(forward, *args, **named)
    rank_handler.RankHandler._connect = lambda *args: planter.connect(connect, *args)
    WeightReceiver.start = lambda *args: planter.start_update(start, *args)
    rank_handler.refresh = lambda model: planter.finish_update(refresh, model)


if __name__ == "__main__":
    plant()
    server.main(sys.argv[1:])
