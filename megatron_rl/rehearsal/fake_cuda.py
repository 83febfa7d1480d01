"""All that stands in for torch, CUDA and NCCL where there is no GPU, in this one file: `install` once in a process that then rehearses.

Tensors, operators and collectives are `device.FakeGpu`'s and `collectives`'; the libraries' kernels are in `kernels/`. The project's own
code and Megatron's run as they are.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_rl.cost.hardware import Gpu
from megatron_rl.rehearsal import collectives, groups, hopper, objects
from megatron_rl.rehearsal.device import FakeGpu, plausible_value
from megatron_rl.rehearsal.hopper import PROPERTIES
from megatron_rl.rehearsal.kernels import deep_gemm, flash_attention, torch_cuda, transformer_engine, triton
from megatron_rl.rehearsal.recorder import Recorder

_current: list[FakeGpu] = []
_FOR_INFERENCE = ("flashinfer", "flash_mla")
"""What Megatron imports for inference where it is installed, which asks for a driver: here it is not."""


def current_device() -> FakeGpu:
    """Return the device of the rank that is rehearsed now."""
    return _current[-1]


def recorder() -> Recorder:
    return current_device().recorder


@contextlib.contextmanager
def one_rank(rank: int, world: int, gpu: Gpu, recorder: Recorder | None = None) -> Iterator[FakeGpu]:
    """Be rank `rank` of `world` on an empty GPU within the context, with its process group. `recorder`: of another kind."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    device = FakeGpu(recorder or Recorder(), collectives.communicate)
    _current.append(device)
    PROPERTIES.total_memory, PROPERTIES.name = gpu.memory, gpu.name
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") makes a host tensor, then copies
    try:
        with device:
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
        _current.pop()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Stream:
    """A stream or an event. What it says about time is nothing."""

    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    __hash__ = object.__hash__

    def record_event(self, event: Any = None) -> _Stream:
        return event or _Stream()

    def elapsed_time(self, _: Any) -> float:
        return 0.0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        recorder().wait("synchronize")

    def wait(self, *_: Any, **__: Any) -> None: ...

    record = wait_stream = wait_event = wait


def _do_not_compile(function: Any = None, **_: Any) -> Any:
    """Leave a function as it is: what a compiler would fuse counts as single operators."""
    return function if function is not None else lambda function: function


def _nothing(*_: Any, **__: Any) -> None: ...


def install() -> None:
    """Make this process believe in one Hopper GPU and in a trainer's libraries, of which none need be installed. There is no way back."""
    if getattr(install, "done", False):
        return
    install.done = True  # type: ignore[attr-defined]
    install_device()
    sys.modules.update(dict.fromkeys(_FOR_INFERENCE))  # type: ignore[arg-type] # as `importlib` documents it
    for library in (torch_cuda, flash_attention, transformer_engine, deep_gemm, triton):
        library.install(recorder)
    _replace_random()
    groups.note_owners()


def install_device() -> None:
    """Make this process believe in one Hopper GPU, and in no library but torch."""
    torch._C._ensureCUDADeviceGuardSet()
    torch_fakes: Any = fake_tensor
    torch_fakes.init_gpu_context = _nothing
    torch_fakes.CONSTANT_NUMEL_LIMIT = -1  # `device` follows numbers itself
    torch.compile = _do_not_compile  # type: ignore[assignment]
    _replace_queries()
    _replace_tensor_methods()
    _replace_all_reduce()
    objects.install(recorder)


def _replace_queries() -> None:
    held, peak = (lambda *_: recorder().now), (lambda *_: recorder().phase.peak.nbytes)
    hopper.pretend(
        mem_get_info=lambda *_: (PROPERTIES.total_memory - recorder().now, PROPERTIES.total_memory),
        memory_allocated=held,
        memory_reserved=held,
        max_memory_allocated=peak,
        max_memory_reserved=peak,
        synchronize=lambda *_: recorder().wait("synchronize"),
        Stream=_Stream,
        Event=_Stream,
        current_stream=lambda *_: _Stream(),
        default_stream=lambda *_: _Stream(),
        stream=lambda _: contextlib.nullcontext(),
    )
    torch.version.cuda = "13.0"


def _replace_random() -> None:
    import megatron.core.tensor_parallel.random as random

    cuda: Any = torch.cuda
    cuda.get_rng_state = random._get_cuda_rng_state = lambda *_, **__: torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = random._set_cuda_rng_state = _nothing
    cuda.manual_seed = cuda.manual_seed_all = _nothing


def _replace_tensor_methods() -> None:
    fake: Any = FakeTensor
    fake.tolist = lambda self: (self.cpu() if self.device.type == "cuda" else plausible_value(self)).tolist()
    fake.data_ptr = _address
    fake.record_stream = _nothing
    plain_data: Any = torch.Tensor.data
    fake.data = property(plain_data.__get__, _set_data)
    storage: Any = torch.UntypedStorage
    typed: Any = torch.TypedStorage
    plain_resize = storage.resize_

    def resize(self: Any, size: int) -> Any:
        result = plain_resize(self, size)
        if _current:
            recorder().resize(self, size)
        return result

    storage.resize_ = resize
    typed._resize_ = lambda self, size: resize(self._untyped_storage, size * self._element_size())
    module: Any = torch.nn.Module
    module.cuda = _move_module
    tensor: Any = torch.Tensor
    plain_pin = tensor.pin_memory
    tensor.pin_memory = lambda self, *_: self if _current else plain_pin(self)
    group: Any = dist.ProcessGroup
    group.set_timeout = _nothing


def _address(tensor: Any) -> int:
    """Return an address as the allocator aligns it, which two views of one storage share as they would."""
    return (tensor.untyped_storage()._cdata << 9) + tensor.storage_offset() * tensor.itemsize


def _set_data(tensor: Any, value: Any) -> None:
    """Give a tensor another's storage, which may lie on another device."""
    torch.Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
    if isinstance(value, FakeTensor):
        tensor.fake_device = value.fake_device


def _move_module(self: Any, *_: Any) -> Any:
    """Move a module's tensors to the device. Parameters are replaced, as a tensor without data cannot take the place of one with data; what
    they are tagged with goes along."""
    moved: dict[int, Any] = {}
    for module in self.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type != "cuda":
                if id(parameter) not in moved:
                    new = torch.nn.Parameter(parameter.data.to("cuda"), parameter.requires_grad)
                    vars(new).update(vars(parameter))
                    moved[id(parameter)] = new
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type != "cuda":
                module._buffers[name] = buffer.to("cuda")
    return self


def _replace_all_reduce() -> None:
    """Keep what it does where the operator, which is not told, finds it."""
    module: Any = dist
    plain = dist.all_reduce

    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        collectives.operation.append(op)
        try:
            return plain(tensor, op, group, async_op)
        finally:
            collectives.operation.pop()

    module.all_reduce = module.distributed_c10d.all_reduce = all_reduce
