"""Texts of completions, decoded by the engine's server: it has the tokens first, and there is one server per engine, but one rank 0."""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.rewards.thinking import ThoughtMarkers, decode_completion
from megatron_rl.rollout.engine import cut_at_stop

HEADER = "x-megatron-rl-text-markers"
TextReader = Callable[[int, np.ndarray], str]
"""Returns the text of a request's completion of this number from its token ids."""


def ask_for_texts(markers: ThoughtMarkers | None) -> dict[str, str]:
    """Return the headers with which a client asks for texts; see `decode_completion` for `markers`."""
    return {HEADER: json.dumps(markers)}


def make_text_reader(
    headers: Mapping[str, str], parameters_B: Sequence[Mapping[str, Any]], model: Path, whole: bool = True
) -> TextReader | None:
    """Return what decodes the completions of a request, or None if the client does not ask for texts. `parameters_B`: SGLang's sampling
    parameters of each completion; `model`: folder of the tokenizer, which is the one that rank 0 loads; `whole`: whether texts also have
    what the last token holds behind a stop text."""
    if HEADER not in headers:
        return None
    markers, stops_B = json.loads(headers[HEADER]), [parameters["stop"] for parameters in parameters_B]

    def read(number: int, ids: np.ndarray) -> str:
        text = decode_completion(load(model), ids.tolist(), markers, stops_B[number])
        return text if whole else cut_at_stop(text, stops_B[number])[0]

    return read


@functools.cache
def load(model: Path) -> Any:
    from megatron_rl.hf.tokenizer import load_tokenizer  # imports transformers

    return load_tokenizer(model)
