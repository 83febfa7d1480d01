"""Real SGLang engines side by side on one device, started together on weights that SGLang makes up, for the parts that measure them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu_parts.rows import Rows
from megatron_rl.config import ArchitectureConfig, Config, PrecisionConfig
from megatron_rl.data.byte_tokenizer import load_tokenizer, make_byte_tokenizer
from megatron_rl.hf.create import make_hf_config
from megatron_rl.precision.contract import PrecisionContract
from rollout_sglang.engine import SGLangEngine
from rollout_sglang.launch_args import EngineLaunchSpec

Engines = dict[str, SGLangEngine]


@contextmanager
def started(
    folder: Path,
    architecture: ArchitectureConfig,
    precisions: Mapping[str, PrecisionConfig],
    rollout: Mapping[str, Any],
    batches: Sequence[int],
) -> Iterator[Engines]:
    """One engine for each precision, none of them ready yet; all are ended afterwards. `rollout`: settings of that section; `batches`:
    CUDA graphs are captured for decoding so many sequences and no others, which takes seconds each."""
    arguments: tuple[str, ...] = ("--load-format", "dummy")
    if torch.cuda.is_available():
        arguments += ("--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs-decode", *map(str, batches))
    engines: Engines = {}
    with ExitStack() as stack:
        for name, precision in precisions.items():
            model = write_model(folder / name, architecture, precision)
            sections = {"model": {"path": model}, "precision": precision, "rollout": dict(rollout)}
            config = Config.model_validate({**sections, "placement": {"kind": "disaggregated"}})  # these give no memory back
            engines[name] = SGLangEngine(EngineLaunchSpec(config, model, model, arguments=arguments))
            stack.callback(engines[name].stop)
        yield engines


def those_up(rows: Rows, engines: Engines) -> Engines:
    """Waits for all; each that does not come up is a failed row."""
    up: Engines = {}
    for name, engine in engines.items():
        with rows.guarded(f"engine {name}"):
            engine.wait_until_ready()
            up[name] = engine
    return up


def write_model(folder: Path, architecture: ArchitectureConfig, precision: PrecisionConfig) -> Path:
    """A checkpoint's folder without weights."""
    contract = PrecisionContract.from_config(precision)
    make_byte_tokenizer(folder)
    config = make_hf_config(architecture, load_tokenizer(folder).eos_token_id, precision.high)
    quantized = contract.hf_quantization_config()
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": quantized} if quantized else {})))
    return folder
