"""Formats numbers, sizes, times, configs, and untrusted text for the pages."""

import json
import re

from megatron_rl.metrics import MetricValue, Unit

_UNSHOWABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def format_value(value: MetricValue, unit: Unit) -> str:
    """Return a value as text, without the words "nats" and "MiB"."""
    if value is None:
        return "not finite"
    if unit == "share":
        return f"{100 * value:.1f} %"
    if unit in ("count", "index", "MiB"):
        return f"{value:,.0f}"
    if unit == "bytes":
        return format_bytes(value)
    if unit == "seconds":
        return f"{value:.2f} s" if value < 100 else format_duration(value)
    return f"{value:.2e}" if value and abs(value) < (1e-3 if unit == "number" else 1e-2) else f"{value:.4g}"


def format_bytes(size: float) -> str:
    """Return bytes with a decimal unit: 3_200_000 is "3.20 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_duration(seconds: float) -> str:
    """Return seconds as "45 s", "7 min 12 s" or "3 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_toml(config: dict[str, object], prefix: str = "") -> str:
    """Return a config as TOML sections for reading: values are written as JSON, and fields that are not set become comments."""

    def line(key: str, value: object) -> str:
        return f"# {key} is not set" if value is None else f"{key} = {json.dumps(value, ensure_ascii=False, default=str)}"

    lines = [line(key, value) for key, value in config.items() if not isinstance(value, dict)]
    text = "\n".join(([f"[{prefix}]"] if prefix and lines else []) + lines)
    sections = [format_toml(value, f"{prefix}.{key}" if prefix else key) for key, value in config.items() if isinstance(value, dict)]
    return "\n\n".join(section for section in (text, *sections) if section)


def visible(text: str) -> str:
    """Replace control characters and unpaired surrogates by escapes such as \\x07, so that any completion can be shown."""
    return _UNSHOWABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
