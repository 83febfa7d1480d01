"""The models of examples/arithmetic/models: as recorded, small, and the same task as one that is made anew."""

import hashlib
import json
import os

import pytest
from support.processes import ROOT, Command
from support.train_command import LONG, finish

from examples.arithmetic.config import DemoConfig
from examples.arithmetic.new_model import make_random_checkpoint
from megatron_rl.config import load_config
from parallel.model_geometry import ModelGeometry

SHIPPED = ROOT / "examples" / "arithmetic" / "models"
NAMES = sorted(path.name for path in SHIPPED.iterdir() if path.is_dir())


def load_demo(name):
    return load_config(ROOT / "configs" / f"{name}.toml", root=DemoConfig, more=ROOT / "examples" / "arithmetic" / f"{name}.toml")


def digest(folder):
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_as_recorded_and_has_the_settings_config_and_tokenizer_of_its_run(name, tmp_path):
    demo, folder = load_demo(name), SHIPPED / name
    assert demo.model.path == folder.relative_to(ROOT) and f"| `{name}` |" in (record := (SHIPPED / "README.md").read_text())
    assert digest(folder) in record and demo.warm_start.seed == 0
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000
    make_random_checkpoint(tmp_path / "new", demo.architecture, 0)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / file).read_bytes() == (tmp_path / "new" / file).read_bytes()
    shipped, new = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path / "new"))
    assert ModelGeometry.from_hf_config(shipped) == ModelGeometry.from_hf_config(new)
    assert "bfloat16" in (shipped.get("dtype"), shipped.get("torch_dtype"))


@pytest.mark.long
@pytest.mark.timeout(6000)
def test_a_model_that_is_made_anew_is_the_same_task(tmp_path):
    """Config and tokenizer are the same, and before RL both answer a share of the held-out questions. Rounding, amplified by 600 steps,
    moves that share: by 20 points between one and two threads of one CPU."""
    new, config = tmp_path / "model", ROOT / "configs" / "quickstart.toml"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
        made = finish(Command(tmp_path / "make", "examples.arithmetic.warm_start", config, f"--model.path={new}"), 2 * LONG)
    assert made.code == 0 and "warm start: step 600/600, " in made.out, made.err
    for file in sorted(path.name for path in new.iterdir() if path.suffix == ".json"):
        assert (new / file).read_bytes() == (SHIPPED / "quickstart" / file).read_bytes()
    options = (
        "--checkpoint",
        new,
        "--baseline",
        SHIPPED / "quickstart",
        "--greedy",
        "--output",
        tmp_path / "results",
        "--data.eval_size=256",
    )
    evaluated = finish(Command(tmp_path / "eval", "megatron_rl", "eval", config, *options, f"--log.dir={tmp_path / 'runs'}"), LONG)
    assert evaluated.code == 0, evaluated.err
    results = json.loads((tmp_path / "results" / "eval.json").read_text())
    row = max(results["comparison"], key=lambda row: row["problems"])  # of all levels
    assert abs(row["mean"]["value"]) < 0.3
    if digest(new) == digest(SHIPPED / "quickstart"):
        assert row["better"] == row["worse"] == 0
