"""The Triton kernel of `kernels.embedding.reference`. Tokens are sorted, and one program adds all rows of a token: sums have one order."""

import torch
import triton
import triton.language as tl

LAUNCH = {"num_warps": 4, "enable_fp_fusion": False}
_COLUMNS = 1024  # columns of a program


@triton.jit(do_not_specialize=["count"])
def add_sorted_rows(sums, tokens, order, rows, count, vocabulary, width, COLUMNS: tl.constexpr):
    """One program for COLUMNS columns of a place in the sorted tokens [count]; `order` has the rows of places. It works if its place is the
    first of a token."""
    place, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    token = tl.load(tokens + place)
    first = (place == 0) | (tl.load(tokens + place - 1, mask=place > 0, other=-1) != token)
    if first & (token >= 0) & (token < vocabulary):
        total, more = tl.zeros([COLUMNS], tl.float32), first
        while more:
            total += tl.load(rows + tl.load(order + place) * width + column, mask=inside, other=0.0).to(tl.float32)
            place += 1
            more = tl.load(tokens + place, mask=place < count, other=-1) == token
        target = sums + token * width + column
        tl.store(target, tl.load(target, mask=inside, other=0.0) + total, mask=inside)


def add_token_rows(sums: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Compute `kernels.embedding.reference.add_token_rows`. Raise ValueError if shapes do not match."""
    width = sums.shape[1]
    if rows.shape != (len(tokens), width) or sums.dtype != torch.float32 or not sums.is_contiguous():
        raise ValueError(f"sums {sums.dtype} {list(sums.shape)} and rows {list(rows.shape)} of {len(tokens)} tokens do not match")
    ordered, order = tokens.sort(stable=True)
    if len(tokens):
        add_sorted_rows[(len(tokens), triton.cdiv(width, _COLUMNS))](
            sums, ordered, order, rows.contiguous(), len(tokens), len(sums), width, COLUMNS=_COLUMNS, **LAUNCH
        )
