"""Shared by unit tests: hypothesis with few examples, stand-ins for the libraries of the GPU back ends."""

from contextlib import suppress
from uuid import uuid4

import psutil
import pytest
from hypothesis import settings

from megatron_rl import redaction

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


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests(monkeypatch):
    """Mask no word of this test because another test held it as a secret."""
    monkeypatch.setattr(redaction, "_secrets", set())
    monkeypatch.setattr(redaction, "_variables", set())


@pytest.fixture
def descendants(monkeypatch):
    """Return a function that returns the processes that run and were started in this test, in whatever session."""
    mark = f"MEGATRON_RL_TEST_{uuid4().hex}"
    monkeypatch.setenv(mark, "1")

    def find():
        found = []
        for process in psutil.process_iter(["status"]):
            with suppress(psutil.Error):
                if process.info["status"] != psutil.STATUS_ZOMBIE and mark in process.environ():
                    found.append(process)
        return found

    return find
