"""Which bytes of a rank's live weights the chunks of a sync write and hash, computed from the live shapes. Whatever the trainer plans, a
row that no chunk holds is refused by name. Only the rows of a vocabulary behind its last token may be left out: the engine itself says
which they are, fills them with zeros, and finds them zero in every sync."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from parallel.chunking import Chunk
from parallel.coverage import Gaps, Size, as_matrix, describe, group_by_name
from parallel.digest import view_rect
from parallel.shards import Rect

Tensors = Mapping[str, torch.Tensor]


def find_padding(model: Any) -> dict[str, tuple[int, int]]:
    """Return (first row, end) of the padding in each weight of a vocabulary, by name, as SGLang's own layers state it."""
    padding = {}
    for name, module in model.named_modules():
        if (indices := getattr(module, "shard_indices", None)) is not None:
            padding[f"{name}.weight"] = indices.num_org_elements, indices.num_org_elements_padded
    return padding


class ProvedRegions:
    """The regions of one rank for one connection, whose chunks are the same in every sync."""

    def __init__(self, chunks: Iterable[Chunk], live: Tensors, padding: Mapping[str, tuple[int, int]]) -> None:
        """`padding`: see `find_padding`. Nothing is refused before `check`."""
        self._shapes = _read_shapes(live)
        self._sent = group_by_name(named_rect for chunk in chunks for named_rect in chunk.targets)
        self._padding = {name: self._view_padding(name, *rows) for name, rows in padding.items() if name in live and rows[0] < rows[1]}
        self._wrong = self._find_wrong()

    def _view_padding(self, name: str, first: int, end: int) -> Rect:
        return Rect(first, 0, end - first, as_matrix(self._shapes[name]).cols)

    def _find_wrong(self) -> str:
        """Describe the first tensor that the chunks leave out in part, or return ""."""
        gaps = Gaps()
        for name, shape in self._shapes.items():
            padding = [self._padding[name]] if name in self._padding else []
            try:
                gap = gaps.find(as_matrix(shape), [*self._sent.get(name, ()), *padding])
            except ValueError as error:
                return f"{name}: {error}"
            if gap is not None:
                return f"{name}: no chunk of the sync has {describe(gap)}, so these bytes are not proved"
        return ""

    def fill_padding(self, live: Tensors) -> None:
        """Fill the padding of `live`, the current tensors, with zeros, as part of a sync."""
        with torch.inference_mode():
            for name, rect in self._padding.items():
                view_rect(live[name], rect).zero_()

    def check(self, live: Tensors) -> Size:
        """Return the size of all live weights, each byte of which is in a chunk or is zero padding. Raise ValueError by name otherwise."""
        if (shapes := _read_shapes(live)) != self._shapes:
            changed = next(name for name in shapes | self._shapes if shapes.get(name) != self._shapes.get(name))
            raise ValueError(
                f"{changed} was {self._shapes.get(changed, 'absent')} when the trainer connected, and is {shapes.get(changed)}"
            )
        if self._wrong:
            raise ValueError(self._wrong)
        for name, rect in self._padding.items():
            if bool(view_rect(live[name], rect).view(torch.uint8).any()):
                raise ValueError(f"{name}: the padding in {describe(rect)} is not zero")
        return Size(len(live), sum(tensor.numel() * tensor.element_size() for tensor in live.values()))


def _read_shapes(live: Tensors) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in live.items()}
