"""Mistral without sliding windows: 7B from v0.3, Nemo, Small 3, Magistral, Devstral. It is a Llama with heads of any width."""

from parallel.families import llama
from parallel.hf_config import HFConfig
from parallel.model_geometry import ModelGeometry

list_layer = llama.list_layer
ARCHITECTURE = "MistralForCausalLM"


def read(config: HFConfig) -> ModelGeometry:
    config.with_defaults(sliding_window=4096).require(sliding_window=None)  # the default of transformers
    return llama.read(config)
