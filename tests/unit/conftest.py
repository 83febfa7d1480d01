"""Shared by unit tests: hypothesis with few examples, stand-ins for the libraries of the GPU back ends."""

import pytest
from hypothesis import settings

settings.register_profile("unit", max_examples=25, deadline=None, derandomize=True)  # CI and a person see the same cases
settings.load_profile("unit")


@pytest.fixture
def fake_libraries(monkeypatch):
    from support import fake_gpu_libraries as fake_kernels

    from megatron_rl.kernels.linear import make_backend

    fake_kernels.install(monkeypatch)
    make_backend.cache_clear()  # no back end keeps a stand-in
    yield
    make_backend.cache_clear()
