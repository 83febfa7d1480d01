"""Log-probs of an export by transformers, in a process of its own: `python -m support.export_scores FOLDER SEQUENCES.json SCORES.pt`."""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from support.transformers_reference import load, response_logprobs


def score(folder, sequences):
    """Return the log-probs of all responses' tokens; transformers itself dequantizes FP8, since its kernels need a GPU."""
    if "quantization_config" not in json.loads((folder / "config.json").read_text()):
        return response_logprobs(load(folder), sequences)
    whole = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=whole, dtype=torch.float32, local_files_only=True)
    return response_logprobs(model.float(), sequences)


if __name__ == "__main__":
    torch.save(score(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())), sys.argv[3])
