"""Model families: one module per architecture, named after the `model_type` of its config.json. A family has these functions:

    ARCHITECTURE                                        the name of the model's class in transformers and SGLang
    read(config: HFConfig) -> ModelGeometry             reads config.json; refuses settings that the trainer does not support
    list_layer(model, layer: int) -> list[Weight]       a layer's weights, in the order of the checkpoint (`parallel.layer_weights`)
    list_mtp_layer(model, number: int)                  weights of the `number`-th layer for multi-token prediction, if there are any
    describe_to_engine(config: dict) -> dict            config.json as SGLang gets it, if it serves the family as another one
    list_mtp_copies(model, number: int)                 copies of other tensors that a checkpoint may hold with it (`parallel.mtp_layers`);
                                                        a family without them does not train these layers

To add a family, add its module here and a row to `tests/support/families.py`. `parallel.refused_families` says why others are refused.
"""

import importlib
import pkgutil
from typing import Any

from parallel.refused_families import REASONS
from parallel.shards import GeometryError

ALIASES = {"kimi_k2": "deepseek_v3", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""Other values of `model_type` for a family, whose config.json and checkpoints are the same."""
FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load_family(model_type: object) -> Any:
    """Return the module of a family. Raise GeometryError if there is none."""
    model_type = ALIASES.get(str(model_type), model_type)
    if (reason := REASONS.get(str(model_type))) is not None:
        raise GeometryError("config.json model_type", model_type, f"is not supported: it {reason}", "use another model")
    if model_type not in FAMILIES:
        raise GeometryError("config.json model_type", model_type, "is not a supported model family", f"use one of {', '.join(FAMILIES)}")
    return importlib.import_module(f"{__name__}.{model_type}")
