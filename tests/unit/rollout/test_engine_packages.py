"""What an engine on a GPU needs of other packages, as folders on the path of imports."""

import pytest

from megatron_rl.errors import UserError
from megatron_rl.rollout import engine_packages

HOPPER, BLACKWELL = 9, 10


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that adds an empty package with files."""

    def add(package: str, *files: str) -> None:
        (tmp_path / package).mkdir()
        for file in ("__init__.py", *files):
            (tmp_path / package / file).touch()
        monkeypatch.syspath_prepend(tmp_path)

    return add


def test_an_engine_needs_its_packages_and_the_attention_that_it_starts_with(install):
    def refusal(**options: object) -> str:
        with pytest.raises(UserError) as refused:
            engine_packages.check(options, False, HOPPER)
        return str(refused.value)

    assert engine_packages.find_missing_packages() == ["sglang-kernel", "flashinfer-python"]
    assert "without sglang-kernel and flashinfer-python (not installed)" in refusal()
    install("flashinfer")
    assert "without sglang-kernel (not installed)" in refusal(attention_backend="triton")
    install("sgl_kernel", "common_ops.abi3.so")
    assert not engine_packages.has_flash_attention_3()
    assert "or set rollout.sglang.attention_backend to triton with precision.reduction = 'fast'" in refusal()
    assert "attention_backend = 'fa3': the installed sglang-kernel has no FlashAttention 3" in refusal(attention_backend="fa3")
    engine_packages.check({"attention_backend": "triton"}, False, HOPPER)
    engine_packages.check({}, True, HOPPER)  # with FlashInfer
    engine_packages.check({}, False, BLACKWELL)  # FlashAttention 3 is not its default


def test_with_the_library_an_engine_starts_with_its_default(install):
    install("flashinfer")
    install("sgl_kernel", "flash_ops.abi3.so")
    engine_packages.check({}, False, HOPPER)
