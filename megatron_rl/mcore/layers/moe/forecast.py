"""All-to-alls of experts whose sizes the host knows before the routers choose, in passes without gradient.

Without a record to replay, only the device knows how many tokens ranks exchange (`token_counts`), and asking it costs a wait in each layer.
Here, a rank sends a part of a fixed size to each rank: the largest share of a rank's tokens that went there in the same layer in recent
passes, times `SLACK`. Tokens come first in a part, and nobody reads the rest. Received parts are spread to the experts' rows by tables that
the device computes (`group_parts`). Each token is in the row in which it would be otherwise, so no bit changes.

A part may be too small. The device notes this and the shares, and all ranks read them once at the end of a pass. The pass is then repeated
with counts, like the first pass, of which nothing is known. Sizes are a function of numbers that all ranks have, so they agree on them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_rl.kernels.device_copy import copy_to_device

SLACK = 1.125
"""Size of a part over the largest share before. That is the largest of many micro-batches, ranks, and replicas, so it is rarely exceeded by
much. More slack sends more bytes, less slack repeats more passes."""
_FADE = 0.98
"""What remains of the largest share after a pass with smaller ones. A pass of few samples must not shrink the parts of the next step."""
_MOST = 1.5
"""Largest sum of parts over the rows that a rank sends. If loads vary more among micro-batches, padding costs more than a wait."""


@dataclass(frozen=True)
class LayerForecast:
    """What a pass of a micro-batch expects of one layer."""

    sizes: list[int] | None  # rows of the part for each rank, or None if the tokens must be counted
    on_device: torch.Tensor  # the same, int64 [ep]
    noted: torch.Tensor  # float32 [ep + 1], of all micro-batches of the pass: `kernels.experts.reference.place_tokens`

    def note(self, counts: torch.Tensor, rows: int) -> None:
        """Note the shares of a layer that counts its tokens, int64 [experts], which add up to `rows`."""
        shares = self.noted[:-1]
        torch.maximum(shares, (counts.view(len(shares), -1).sum(1) / rows).float(), out=shares)


class Forecast:
    """The parts of a model's layers."""

    def __init__(self, layers: int, ep: int, device: torch.device) -> None:
        self._ep = ep
        self._shares = torch.ones(layers, 1) if ep == 1 else None  # [layers, ep], or None if unknown
        self._noted = torch.zeros(layers, ep + 1, device=device)

    def expect(self, layers: Sequence[int], rows: Sequence[int]) -> list[Mapping[int, LayerForecast]]:
        """Return, for each micro-batch, the forecast of each of `layers`. `rows` holds the most rows that a rank sends in each."""
        sizes = torch.zeros(len(rows), len(layers), self._ep, dtype=torch.long)
        if self._shares is not None:
            shares = self._shares[list(layers)].double() * (SLACK if self._ep > 1 else 1)
            sizes = (shares * torch.tensor(rows).view(-1, 1, 1)).ceil().clamp(min=1).long()  # an empty part would be an exchange of nothing
        on_device = copy_to_device(sizes, self._noted.device)
        return [
            {
                layer: LayerForecast(parts if 0 < sum(parts) <= _MOST * most else None, there, self._noted[layer])
                for layer, parts, there in zip(layers, of_layers.tolist(), on_device[number], strict=True)
            }
            for number, (of_layers, most) in enumerate(zip(sizes, rows, strict=True))
        ]

    def conclude(self) -> bool:
        """Learn from a pass; return whether all parts were large enough. Otherwise, the next pass counts. A pass whose experts are not
        grouped notes nothing. Waits for the device. Collective among all ranks."""
        dist.all_reduce(self._noted, dist.ReduceOp.MAX)
        noted, self._noted = self._noted.cpu(), torch.zeros_like(self._noted)
        shares, held = noted[:, :-1], not bool((noted[:, -1] > 0).any())
        if self._ep > 1 and bool(shares.any()):
            self._shares = None if not held else shares if self._shares is None else shares.maximum(_FADE * self._shares)
        return held
