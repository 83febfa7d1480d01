"""A GPU without data, in one process."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from megatron_rl.rehearsal import collectives, fake_cuda, kernels
from megatron_rl.rehearsal.device import FakeGpu
from megatron_rl.rehearsal.recorder import Recorder


@pytest.fixture
def gpu(monkeypatch):
    torch._C._ensureCUDADeviceGuardSet()
    device = FakeGpu(Recorder(), collectives.communicate)
    device.recorder.begin("test")
    monkeypatch.setattr(kernels, "_recorder", [lambda: device.recorder])
    monkeypatch.setattr(FakeTensor, "data_ptr", fake_cuda._address)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    with device:
        yield device
