import pytest
from support import tmp_graph
from support.models import FP8
from parallel.families import FAMILIES

@pytest.mark.parametrize("family", FAMILIES)
def test_same(worlds, model_folder, family):
    for precision in (FP8, {"mode": "bf16", "high": "bf16"}):
        found = worlds(1).call(tmp_graph.compare, model_folder(family), precision)[0]
        print(found)
        assert found[2] and found[3], found
        assert found[0] and found[1], "order"
