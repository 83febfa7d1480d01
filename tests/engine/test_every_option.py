"""Every documented value of the configuration is taken through a real run, together with the values of others that it meets."""

import itertools
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.choices import LEFT_OUT, MODELS, meets
from support.covering import find_values, list_factors, list_present, load, merge, read_array, write_inputs
from support.train_command import TORCHRUN, finish, latest, read_rows, train
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_rl.diagnosis.canary import promises_exactness
from megatron_rl.plugs import ADVANTAGES, DATA_FORMATS, LOSSES, REWARDS, TRACKERS
from parallel.formats import FORMATS, MODES
from parallel.model_geometry import ModelGeometry
from parallel.shards import GeometryError
from parallel.transport import TRANSPORTS

pytestmark = pytest.mark.timeout(6000)
ROWS = read_array()
LARGEST = 2.0
"""Nats by which a log-prob of the engine may differ if the engine alone is quantized, or sums in another order."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Configuration and config.json of every row."""
    return [load(row, tmp_path_factory.mktemp("row")) for row in ROWS]


def test_every_enumeration_switch_and_built_in_name_is_in_a_row(loaded):
    """A new one needs `python -m support.covering`, or a reason in `LEFT_OUT`."""
    present = {field for config, _ in loaded for field in list_present(config)}
    present |= {("reward.function", part.name) for config, _ in loaded for part in config.reward.parts.values()}
    known = {
        "algorithm.loss": LOSSES.builtin, "algorithm.advantage": (*ADVANTAGES.builtin, "gae"), "precision.mode": MODES,
        "sync.transport": TRANSPORTS.builtin, "reward.function": REWARDS.builtin, "data.format": DATA_FORMATS.builtin,
        "log.trackers": TRACKERS.builtin,
    }  # fmt: skip
    wanted = {(name, value) for name, values in (find_values() | known).items() for value in values}
    assert wanted - present == LEFT_OUT.keys()
    assert {hf_config["model_type"] for _, hf_config in loaded} == MODELS.keys()
    assert {row["weights"] for row in ROWS} == FORMATS.keys()
    assert any(config.algorithm.correction == () for config, _ in loaded)


def test_every_kind_of_rotary_positions_is_in_a_row(loaded):
    def accepts(family, kind):
        try:
            ModelGeometry.from_hf_config(MODELS[family] | {"rope_scaling": {"rope_type": kind}})
        except GeometryError as error:
            return error.value != kind
        return True

    accepted = {kind for kind in ("default", *ROPE_INIT_FUNCTIONS) for family in MODELS if accepts(family, kind)}
    scalings = [hf_config.get("rope_scaling") or {} for _, hf_config in loaded]
    assert {each.get("rope_type", each.get("type", "default")) for each in scalings} == accepted


def test_pairs_are_covered():
    """The array must be written again if factors or their values changed."""
    factors = list_factors()
    assert all(row.keys() == factors.keys() for row in ROWS)
    assert {name: {row[name] for row in ROWS} for name in factors} == {name: set(values) for name, values in factors.items()}
    assert len({pair for row in ROWS for pair in itertools.combinations(row.items(), 2) if meets(pair[0][0], pair[1][0])}) > 4000


class Judge(BaseHTTPRequestHandler):
    """A reward server."""

    def do_POST(self):
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["texts"]
        body = json.dumps({"rewards": [len(set(text)) / 8 for text in texts]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_): ...


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Address of a reward server. Also tells trackers and workers where to find what they need."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as running:
        threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_two_steps(number, tmp_path, server):
    row = ROWS[number]
    write_inputs(row, tmp_path)
    changes = merge(row, tmp_path, server)
    done = finish(train(tmp_path, changes, launcher=TORCHRUN if row["trainer"] != "one rank" else ()))
    assert done.code == 0, f"{row}\n{done.err}"
    steps = read_rows(latest(tmp_path))[1:]
    assert len(steps) == 2 and all(step["sync/proved"] == step["sync/tensors"] > 0 for step in steps)
    masked = row["algorithm.mask_truncated_completions"] == "true"  # a random model rarely stops, so nothing may be left
    learning = steps[1:] if row["critic"] == "alone first" else steps
    assert all(step["grad_norm"] > 0 or masked for step in learning), "nothing is learned"
    bound = 0 if promises_exactness(*load(row, tmp_path)) else LARGEST
    compared = [step["mismatch/abs_max"] for step in steps if "mismatch/abs_max" in step]  # tokens of older versions are not compared
    assert max(compared, default=0) <= bound and len(compared) == (1 if row["ahead"] == "one step" else 2), row
