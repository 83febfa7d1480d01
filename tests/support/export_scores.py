"""Log-probs of an export by transformers, in a process that found accelerate before it imported transformers."""

import json
import site
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch


def start_process():
    """Return a pool of one new process, which has not imported transformers yet. transformers reads FP8 checkpoints by accelerate."""
    return ProcessPoolExecutor(1, get_context("spawn"), site.addsitedir, (f"{sys.prefix}/peft",))  # launch/requirements-peft.txt


def score(folder, sequences):
    """Return the log-probs of all responses' tokens; transformers itself dequantizes FP8, since its kernels need a GPU."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    from support.transformers_reference import load, response_logprobs

    if json.loads((folder / "config.json").read_text()).get("quantization_config", {}).get("quant_method") != "fp8":
        return response_logprobs(load(folder), sequences)
    whole = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=whole, dtype=torch.float32, local_files_only=True)
    return response_logprobs(model.float(), sequences)
