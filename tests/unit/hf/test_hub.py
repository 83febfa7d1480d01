"""Hub models from a local HTTP server: what is downloaded when, and a one-line message for every failure."""

import json
import re
from pathlib import Path

import pytest
from support.fake_hub import serve_hub
from support.models import make_checkpoint

from megatron_rl.config import ModelConfig
from megatron_rl.errors import UserError
from megatron_rl.hf.hub import fetch_model, fetch_weights, pin_hub_model
from megatron_rl.hf.read import HFCheckpoint

NAME = Path("hf:someone/unknown")
SMALL = {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("hub") / "model")
    (folder / "pytorch_model.bin").write_bytes(b"unused")
    return folder


@pytest.fixture
def hub(model, tmp_path, monkeypatch):
    with serve_hub() as hub:
        hub.add("someone/unknown", model)
        hub.use(monkeypatch, tmp_path / "cache")
        yield hub


def make_bare(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def refusal(path: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        fetch_model(Path(path), "--checkpoint")
    line = str(caught.value)
    field, _, rest = line.partition("': ")
    assert field.startswith(f"--checkpoint = '{path}") and "\n" not in line  # includes the commit once it is known
    return rest


def test_small_files_are_downloaded_first_and_nothing_twice(hub, model):
    pinned = pin_hub_model(NAME)
    assert str(pinned) == f"{NAME}@{hub.commits['someone/unknown']}" == str(pin_hub_model(pinned))
    assert set(hub.downloads) == SMALL
    folder = ModelConfig(path=pinned).folder
    assert (folder / "config.json").read_bytes() == (model / "config.json").read_bytes()
    fetch_weights(pinned)
    assert sorted(hub.downloads) == sorted([*SMALL, "model.safetensors"])
    HFCheckpoint(folder, json.loads((folder / "config.json").read_text()))
    hub.requests.clear()
    fetch_weights(pinned)
    assert fetch_model(pinned, "--checkpoint") == folder and not hub.requests


def test_a_split_checkpoint_is_downloaded_by_its_index_and_a_pinned_name_survives_a_moving_branch(hub, model, tmp_path):
    split = make_bare(tmp_path / "split")
    (split / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}))
    for name in ("part-1.safetensors", "part-2.safetensors", "consolidated.safetensors"):
        (split / name).write_bytes(name.encode())
    hub.add("someone/split", split)
    folder = fetch_model(Path("hf:someone/split"), "--checkpoint")
    assert {file.name for file in folder.glob("*.safetensors")} == {"part-1.safetensors", "part-2.safetensors"}
    first = pin_hub_model(NAME)
    hub.add("someone/unknown", make_bare(tmp_path / "other"))
    assert pin_hub_model(NAME) != first
    assert (ModelConfig(path=first).folder / "config.json").read_bytes() == (model / "config.json").read_bytes()


def test_missing_models_are_refused_in_one_line(hub, model, tmp_path):
    hub.add("meta/gated", model, gated=True)
    hub.add("someone/empty", tmp_path / "empty")
    hub.add("someone/bare", make_bare(tmp_path / "bare"))
    for path, line in {
        "hf:someone/missing": f"is not a model that you can see on {hub.url}; correct the name; set HF_TOKEN for a private model",
        "hf:someone/unknown@v2": "has no revision v2; name a branch, a tag or a full commit, or omit @REVISION",
        f"hf:someone/unknown@{'0' * 40}": f"has no revision {'0' * 40}; name",
        "hf:meta/gated": f"is gated: its owner grants access to accounts; request it at {hub.url}/meta/gated, then run `hf auth login` or",
        "hf:someone/empty": "holds no config.json; name a model with config.json, tokenizer and safetensors weights",
        "hf:someone/bare": "holds no model.safetensors; name a model with safetensors weights",
        "hf:some--one/unknown": "is not a valid name on the hub (",
        "hf:unknown": "is not of the form hf:OWNER/NAME[@REVISION], such as hf:Qwen/Qwen3-8B",
        "hf:a/b/c": "is not of the form",
        "hf:someone/unknown@": "is not of the form",
    }.items():
        assert refusal(path).startswith(line), refusal(path)


def test_offline_reads_the_cache_and_names_the_file_that_is_missing_there(hub, monkeypatch, tmp_path):
    def set_offline(offline: bool) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", offline)

    set_offline(True)
    fix = "unset it, or run `hf download someone/unknown` on a machine with network access"
    assert refusal(NAME) == f"HF_HUB_OFFLINE is set, and config.json is not in {tmp_path / 'cache'}; {fix}"
    set_offline(False)
    pinned = pin_hub_model(NAME)
    set_offline(True)
    assert refusal(pinned) == f"HF_HUB_OFFLINE is set, and model.safetensors is not in {tmp_path / 'cache'}; {fix}"
    set_offline(False)
    folder = fetch_model(NAME, "--checkpoint")
    set_offline(True)
    hub.requests.clear()
    assert fetch_model(NAME, "--checkpoint") == folder and not hub.requests


def test_an_unreachable_hub_is_refused_and_a_local_folder_returned_unchanged(model, tmp_path, monkeypatch):
    with serve_hub() as hub:
        pass
    hub.use(monkeypatch, tmp_path / "cache")
    assert re.match(rf"cannot be downloaded from {hub.url} \(.*refused.*\), and is not in the cache; check the network", refusal(NAME))
    assert pin_hub_model(model) == model == fetch_model(model, "--checkpoint") == ModelConfig(path=model).folder
