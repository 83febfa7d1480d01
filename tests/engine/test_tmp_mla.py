import pytest
import torch
from support import tmp_mla, trainer_engine
from support.processes import World

from parallel.layout import Layout

LONG = [[(7 * i) % 250 for i in range(n)] for n in (1, 3, 31, 33, 64, 70, 130)]
MODES = {
    "fp8": {"mode": "fp8_unified", "high": "fp32"},
    "fp8_bf16": {"mode": "fp8_unified", "high": "bf16"},
    "bf16": {"mode": "bf16", "high": "bf16"},
    "fp32": {"mode": "bf16", "high": "fp32"},
}


@pytest.mark.parametrize(
    "layout, tp, mode",
    [
        (Layout(tp=2), 2, "fp8"),
        (Layout(cp=2), 1, "fp8_bf16"),
        (Layout(), 2, "bf16"),
        (Layout(pp=2), 4, "fp8"),
        (Layout(tp=4), 1, "bf16"),
    ],
)
def test_m(layout, tp, mode, tmp_path):
    with World(layout.world_size, tmp_path / "world") as world:
        world.call(tmp_mla.start, "deepseek_v3", tmp_path, MODES[mode], layout, {"tp": tp}, tmp_mla.DENSE)
        world.call(tmp_mla.change, "deepseek_v3", 1, tmp_mla.DENSE)
        world.call(trainer_engine.sync, 1)
        g = world.call(trainer_engine.generate, LONG)[0]
        d = (g["engine"] - g["trainer"]).abs()
        print("RESULT", layout, tp, mode, len(d), d.max(), (d != 0).sum())
        assert torch.equal(g["engine"], g["trainer"])
        g = world.call(trainer_engine.generate, LONG)[0]
        assert torch.equal(g["engine"], g["trainer"])
