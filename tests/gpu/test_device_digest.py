"""The digest's kernel on a GPU gives the sums of a plain loop, and a rectangle's digest is its copy's."""

import pytest
import torch
from support import fp8_reference as device_sums

from parallel.digest import digest, digest_all
from parallel.shards import Rect

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("size", [0, 1, 4096, (256 << 10) + 4, 600_001])
def test_sums_are_those_of_a_plain_loop(size):
    from parallel.digest_triton import run_sums

    flat = torch.randint(0, 256, (size + 4,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for start in (0, 1, 4):
        part = flat[start : start + size]
        assert torch.equal(run_sums(flat.cuda()[start : start + size]).cpu(), device_sums.run_sums(part))


def test_digests_of_rectangles():
    values = torch.randn(300, 512).to(torch.float8_e4m3fn).cuda()
    rect = Rect(17, 128, 200, 256)
    cut = values.view(torch.uint8)[17:217, 128:384].clone().view(torch.float8_e4m3fn)
    whole = Rect(0, 0, 200, 256)
    assert digest(values, rect) == digest(cut, whole) == digest_all({"w": values}, [("w", whole), ("w", rect)])[1]
    cut.view(torch.uint8)[199, 255] ^= 1
    assert digest(values, rect) != digest(cut, whole)
