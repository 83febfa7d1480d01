"""The format of a checkpoint's quantized weights, from config.json alone. No torch."""

from collections.abc import Mapping
from typing import Any

from megatron_rl.errors import UserError
from parallel.formats import BF16, FORMATS, FP32, TensorFormat


def find_checkpoint_format(hf_config: Mapping[str, Any]) -> TensorFormat | None:
    """Return the format of the quantized weights that config.json describes, or None. Raise UserError for an unsupported format."""
    quantization = hf_config.get("quantization_config")
    if quantization is None:
        return None
    settings = {"fmt": "e4m3", **quantization} if isinstance(quantization, dict) else {}

    def find_differences(format: TensorFormat) -> dict[str, object]:
        wanted = format.quantization_config().items()
        return {name: value for name, value in wanted if name != "modules_to_not_convert" and settings.get(name) != value}

    known = [format for format in FORMATS.values() if format.quantized]
    format = min(known, key=lambda format: ("quant_method" in (different := find_differences(format)), len(different)))
    for name, supported in find_differences(format).items():
        if name == "quant_method":
            supported = " or ".join(dict.fromkeys(str(format.engine_quantization) for format in known))
        rule, fix = f"is not supported, only {supported} is", "use a BF16 checkpoint, or one with FP8 weights in blocks of 128x128"
        raise UserError(f"config.json quantization_config.{name}", str(settings.get(name)), rule, fix)
    return format.with_scales("pow2" if settings.get("scale_fmt") == "ue8m0" else "fp32")


def find_high_format(hf_config: Mapping[str, Any]) -> str:
    """Return the format of a checkpoint's other tensors, as `precision.high` names it. transformers 5 writes `dtype`, older versions
    `torch_dtype`."""
    return FP32.name if FP32.dtype in (hf_config.get("torch_dtype"), hf_config.get("dtype")) else BF16.name
