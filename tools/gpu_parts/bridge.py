"""Part `bridge`: weights by CUDA IPC into a live SGLang engine, three policy versions, each proved byte by byte before it is served."""

from __future__ import annotations

from gpu_parts.rows import Rows, run_part
from gpu_parts.training import train

SETTINGS = {
    "sync.transport": "cuda_ipc",
    "precision.high": "bf16",
    "model.create.hidden_size": 1024,
    "model.create.intermediate_size": 3072,
    "model.create.num_hidden_layers": 4,
    "model.create.num_attention_heads": 8,
    "model.warm_start.steps": 0,
    "train.steps": 2,
    "data.eval_size": 16,
    "rollout.start_timeout": 70.0,
}


def part(rows: Rows) -> None:
    train(rows, "cuda_ipc", SETTINGS)


if __name__ == "__main__":
    run_part(part)
