"""The platform class that `rollout_sglang.platform.activate` names, in a separate module because it imports SGLang."""

import functools
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from parallel.formats import SERVED_METHODS


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Pure PyTorch CPU platform without Triton and graphs, which SGLang's base class uses."""

    _enum = PlatformEnum.OOT
    supported_quantization = list(SERVED_METHODS)  # noqa: RUF012 - SGLang's own declaration style

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: Any = None) -> str:
        return "eager"

    def empty_cache(self) -> None:
        """Do nothing. SGLang's method collects garbage, which takes 0.4 s at every cache flush."""

    def get_quantization_config(self, quantization: str) -> Any:
        return _configs().get(quantization)


@functools.cache
def _configs() -> dict[str, type]:
    """Return SGLang's quantization configurations with float32 activations allowed, which are faster than BF16 on a CPU."""
    from sglang.srt.layers.quantization import QUANTIZATION_METHODS

    class AnyFloat:
        @classmethod
        def get_supported_act_dtypes(cls) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16, torch.float32]

    return {method: type("CpuConfig", (AnyFloat, QUANTIZATION_METHODS[method]), {}) for method in SERVED_METHODS}
