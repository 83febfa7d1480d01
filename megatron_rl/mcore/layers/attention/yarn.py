"""YaRN for plain attention, in halves or pairs and for a part of each head. Megatron's own class rotates whole heads in halves."""

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_find_correction_range, _yarn_linear_ramp_mask

from parallel.hf_config import Yarn


def extend_frequencies(frequencies: torch.Tensor, theta: float, yarn: Yarn) -> torch.Tensor:
    """Return YaRN's frequencies for `frequencies` float32 `[pairs]` of base `theta` (arXiv 2309.00071, section 3.2): high ones stay, low
    ones are divided by YaRN's factor. The order of operations is that of transformers and SGLang, so the bits are theirs."""
    width, device = 2 * len(frequencies), frequencies.device
    length = yarn.original_max_position_embeddings
    low, high = _yarn_find_correction_range(yarn.beta_fast, yarn.beta_slow, width, theta, length, yarn.truncate)
    kept = 1 - _yarn_linear_ramp_mask(low, high, len(frequencies), device)
    wavelengths = theta ** (torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    return 1.0 / (yarn.rotary_scaling_factor * wavelengths) * (1 - kept) + frequencies * kept
