"""When rows are padded so that every rank's part has whole groups of tokens."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rl.mcore.actor import count_row_multiple
from parallel.formats import BF16, FP8

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    "tp, tokens, device, format, multiple",
    [
        (4, 12288, CUDA, FP8, 512),
        (4, 12287, CUDA, FP8, 64),
        (2, 6144, CUDA, FP8, 256),
        (8, 8192, CUDA, FP8, 128),
        (4, 1535, CUDA, FP8, 4),
        (2, 8192, CPU, FP8, 2),
        (2, 8192, CUDA, BF16, 2),
        (1, 8192, CUDA, FP8, 1),
    ],
)
def test_rows_are_padded_where_it_pays(tp, tokens, device, format, multiple):
    config = SimpleNamespace(sequence_parallel=tp > 1, tensor_model_parallel_size=tp, linear_format=format)
    assert count_row_multiple(config, tokens, device) == multiple
