"""Compare the cost of two orders of operations for the gated delta rule on a CPU: `python tools/gated_delta_orders.py [--repeats N]`.

By token is this project's order (`megatron_rl/kernels/gated_delta`). Restarted blocks are the usual chunked form with blocks of C tokens at
multiples of C from a sequence's start, always computed for C rows, so a decoded token computes its block again. Both orders give training
and decoding equal bits, but not each other's. Times are CPU time of one thread, the least of all repeats; both orders take turns.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_rl.kernels.gated_delta.scan import Inputs, Scan, advance_states

BLOCKS = (16, 32, 64)
DECODED = 16


def multiply_block(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_decay: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (outputs `[n, h, C, v_dim]`, the next state) of a block, by the UT transform (arXiv:2412.06464)."""
    total = log_decay.cumsum(-1)
    lower = torch.ones(2 * [q.shape[-2]], dtype=torch.bool).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    grown, scaled = total.exp().unsqueeze(-1), k * beta.unsqueeze(-1)
    right = (v - (k * grown) @ state) * beta.unsqueeze(-1)
    delta = torch.linalg.solve_triangular(((scaled @ k.mT) * decay).tril(-1), right, upper=False, unitriangular=True)
    out = (q * grown) @ state + ((q @ k.mT) * decay) @ delta
    return out, state * grown[..., -1:, :] + (k * (total[..., -1:] - total).exp().unsqueeze(-1)).mT @ delta


def run_blocks(inputs: Inputs, sequences: int, size: int) -> torch.Tensor:
    """Compute equally long sequences side by side in blocks of `size` tokens. Return `[n, h, t, v_dim]`."""
    rows = [x.unflatten(0, (sequences, -1)).transpose(1, 2) for x in inputs]
    rows[3] = rows[3].log()
    state = inputs.q.new_zeros(sequences, inputs.v.shape[1], inputs.k.shape[2], inputs.v.shape[2])
    outs = []
    for block in zip(*(x.split(size, 2) for x in rows), strict=True):
        out, state = multiply_block(state, *block)
        outs.append(out)
    return torch.cat(outs, 2)


def draw_inputs(tokens: int, heads: int, dim: int) -> Inputs:
    """Return random inputs of the recurrence."""
    numbers = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, dim, generator=numbers) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    decay, beta = torch.rand(2, tokens, heads, generator=numbers)
    return Inputs(q * dim**-0.5, k, v, 0.5 + decay / 2, beta)


def time_turns(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return each function's least seconds of this process."""
    seconds: dict[str, float] = {}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.process_time()
            function()
            seconds[name] = min(seconds.get(name, float("inf")), time.process_time() - start)
    return seconds


def train(function: Callable[[Inputs], torch.Tensor], inputs: Inputs) -> None:
    """Compute outputs and the gradients of all inputs."""
    leaves = Inputs(*(x.detach().requires_grad_() for x in inputs))
    torch.autograd.grad(function(leaves).square().sum(), leaves)


def compare(heads: int, dim: int, sequences: int, tokens: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return seconds by work and order, and check that both orders compute the same function."""
    inputs, lengths = draw_inputs(tokens, heads, dim), (tokens // sequences,) * sequences
    orders: dict[str, Callable[[Inputs], torch.Tensor]] = {"by token": lambda x: Scan.apply(lengths, *x)}
    orders |= {f"C = {size}": partial(run_blocks, sequences=sequences, size=size) for size in BLOCKS}
    by_block = run_blocks(inputs, sequences, BLOCKS[0]).transpose(1, 2).flatten(0, 1)
    assert torch.allclose(orders["by token"](inputs), by_block, atol=1e-5)
    token = Inputs(*(x[:DECODED] for x in inputs))
    states = torch.randn(DECODED, heads, dim, dim, generator=torch.Generator().manual_seed(1))
    decode: dict[str, Callable[[], object]] = {"by token": lambda: advance_states(token, states, (1,) * DECODED)}
    for size in BLOCKS:
        q, k, v, decay, beta = (x.unflatten(0, (DECODED, -1)).transpose(1, 2) for x in draw_inputs(DECODED * size, heads, dim))
        decode[f"C = {size}"] = partial(multiply_block, states, q, k, v, decay.log(), beta)
    with torch.no_grad():
        forward = time_turns({name: partial(function, inputs) for name, function in orders.items()}, repeats)
        decoded = time_turns(decode, 5 * repeats)
    trained = time_turns({name: partial(train, function, inputs) for name, function in orders.items()}, repeats)
    return {"forward": forward, "forward and backward": trained, f"decode, {DECODED} sequences": decoded}


def main() -> None:
    """Print a table: seconds by token, and the ratio of each block size to them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1024)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = [f"C = {size}" for size in BLOCKS]
    print(f"| heads, sequences | work | by token | {' | '.join(names)} |\n|{'---|' * (3 + len(names))}")
    for heads, dim in ((4, 64), (32, 128)):
        for sequences in (1, 16):
            for work, seconds in compare(heads, dim, sequences, arguments.tokens, arguments.repeats).items():
                own = seconds["by token"]
                ratios = " | ".join(f"{seconds[name] / own:.1f}x" for name in names)
                print(f"| {heads} of {dim}, {sequences} | {work} | {own * 1e3:.3g} ms | {ratios} |", flush=True)


if __name__ == "__main__":
    main()
