"""Asynchronous copies from the host."""

import torch


def copy_to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return x on `device`. Copy to a GPU through pinned memory, which torch keeps until the copy is done; a plain `x.to(device)` waits for
    all work that was queued on the device before."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)
