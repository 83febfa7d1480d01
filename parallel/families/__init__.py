"""Model families, one a file: everything that is known of an architecture. A module's name is the `model_type` of its config.json.

A family has these functions:

    read(config: HFConfig) -> ModelGeometry             what config.json says; refuses what the trainer does not compute
    list_layer(model, layer: int) -> list[Weight]       a layer's weights, in the order of the checkpoint (`parallel.layer_weights`)
    list_mtp_layer(model, number: int)                  where there are layers for multi-token prediction: those of the `number`-th

To add one, add its file here and a row to `tests/support/families.py`.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from parallel.shards import GeometryError

FAMILIES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load_family(model_type: object) -> Any:
    """Return the module of a family. Raise GeometryError where there is none."""
    if model_type not in FAMILIES:
        raise GeometryError("config.json model_type", model_type, "is no model family known here", f"use one of {', '.join(FAMILIES)}")
    return importlib.import_module(f"{__name__}.{model_type}")
