"""The format of a checkpoint's quantized weights, from config.json alone, and names of stacked tensors (`hf.stacks`). No torch."""

import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import UserError
from parallel.formats import BF16, FORMATS, FP32, NAMED_MODULES, TensorFormat

_PART = re.compile(r"(.*\.experts\.(?:gate_up|down)_proj(?:_bias)?)\.(\d+)")


def find_stack(name: str) -> tuple[str, int] | None:
    """Return (name of the stored tensor, index there) of a part, or None for another tensor."""
    match = _PART.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def list_mxfp4(stack: str) -> tuple[str, str]:
    """Return the names of a stack's bytes and scales in MXFP4."""
    return stack + "_blocks", stack + "_scales"


def find_checkpoint_format(hf_config: Mapping[str, Any]) -> TensorFormat | None:
    """Return the format of the quantized weights that config.json describes, or None. MXFP4 is none, since its values are exact in BF16.
    Raise UserError for an unsupported format."""
    quantization = hf_config.get("quantization_config")
    if quantization is None or stores_mxfp4(hf_config):
        return None
    settings = {"fmt": "e4m3", **quantization} if isinstance(quantization, dict) else {}
    settings["fmt"] = "e4m3" if settings.get("fmt") == "float8_e4m3fn" else settings.get("fmt")  # as MiniMax writes it

    def find_differences(format: TensorFormat) -> dict[str, object]:
        wanted = format.quantization_config().items()
        return {name: value for name, value in wanted if name not in NAMED_MODULES and settings.get(name) != value}

    known = [format for format in FORMATS.values() if format.quantized]
    format = min(known, key=lambda format: ("quant_method" in (different := find_differences(format)), len(different)))
    for name, supported in find_differences(format).items():
        if name == "quant_method":
            supported = " or ".join(dict.fromkeys(str(format.engine_quantization) for format in known))
        rule, fix = f"is not supported, only {supported} is", "use a BF16 checkpoint, or one with FP8 weights in blocks of 128x128"
        raise UserError(f"config.json quantization_config.{name}", str(settings.get(name)), rule, fix)
    return format.with_scales("pow2" if settings.get("scale_fmt") == "ue8m0" else "fp32")


def stores_mxfp4(hf_config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes gpt-oss's experts in MXFP4 (`hf.stacks`)."""
    quantization = hf_config.get("quantization_config")
    is_gpt_oss = hf_config.get("model_type") == "gpt_oss"
    return is_gpt_oss and isinstance(quantization, Mapping) and quantization.get("quant_method") == "mxfp4"


def find_high_format(hf_config: Mapping[str, Any]) -> str:
    """Return the format of a checkpoint's other tensors, as `precision.high` names it. transformers 5 writes `dtype`, older versions
    `torch_dtype`."""
    return FP32.name if FP32.dtype in (hf_config.get("torch_dtype"), hf_config.get("dtype")) else BF16.name
