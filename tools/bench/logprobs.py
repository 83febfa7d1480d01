"""Measure the memory of log-probs and their gradient, from hidden states and the output layer's weight, for 1, 4, 16 times as many tokens.

    python tools/bench/logprobs.py                        # 16,384 tokens, 151,936 words
    python tools/bench/logprobs.py --precision bf16

One pass forward and backward each, in a process of its own; megabytes are the most that the process held beside hidden states, weight and
their gradients. `whole` is torch's product and log-softmax with autograd, in FP32 after the product, for at most --whole tokens: each takes
three matrices of tokens x words. The hidden width is small, since it does not count.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from typing import Annotated, Literal

import torch
import typer

from megatron_rl.mcore.model import start_megatron, stop_megatron
from megatron_rl.mcore.passes.logprobs import Targets, token_logprobs
from parallel.layout import Layout


def _measure(whole: bool, tokens: int, vocabulary: int, width: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return (bytes, processor seconds) of one pass."""
    torch.set_num_threads(1)
    start_megatron(Layout(), seed=0)
    hidden, weight = (torch.randn(rows, width, dtype=dtype).requires_grad_() for rows in (tokens, vocabulary))
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    targets = torch.randint(vocabulary, (tokens,))
    (hidden[:16] @ weight[:16].t()).sum().backward()  # loads what products need
    before, start = _peak_bytes(), time.process_time()
    if whole:
        logprobs = (hidden @ weight.t()).float().log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    else:
        logprobs = token_logprobs(hidden, weight, Targets(targets, 1.0))
    logprobs.sum().backward()
    used = _peak_bytes() - before, time.process_time() - start
    stop_megatron()
    return used


def _peak_bytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main(
    tokens: Annotated[int, typer.Option(min=16, help="The most.")] = 16384,
    vocabulary: Annotated[int, typer.Option(min=1)] = 151936,
    width: Annotated[int, typer.Option(min=1, help="Of hidden states.")] = 64,
    whole: Annotated[int, typer.Option(min=0, help="The most tokens with whole logits.")] = 2048,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option()] = "fp32",
) -> None:
    """Take the passes, print."""
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    for share in (16, 4, 1):
        count = tokens // share
        for name, is_whole in (("chunks", False), ("whole", True)):
            if is_whole and count > whole:
                continue
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                size, seconds = pool.apply(_measure, (is_whole, count, vocabulary, width, dtype))
            print(f"{count:7d} tokens  {name:6s}  {size / 1e6:7.0f} MB  {seconds:6.1f} CPU s", flush=True)


if __name__ == "__main__":
    typer.run(main)
