"""`megatron-rl train` end to end: two ranks under torchrun whose engine is killed and replaced, a stop, and one rank that goes on to the
end; the run's files, and its export."""

import json
import math
import shutil
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pytest
from pyarrow import parquet
from support import train_command
from support.models import TENSORS, edit_config, make_checkpoint, make_slow_tokenizer, read_weights
from support.processes import ROOT, Command, Done
from support.train_command import finish, read_json, read_rows

from megatron_rl.hf.files import list_kept_files
from megatron_rl.hf.tokenizer import check_copy
from megatron_rl.mcore.checkpoint.export import export_checkpoint

pytestmark = pytest.mark.timeout(6000)
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
TASK = "examples.arithmetic.task:Arithmetic"


class Runs(NamedTuple):
    run: Path
    stopped: Done
    stopped_at: int
    """Steps that the stopped run has rows of."""
    refused: Done
    finished: Done


def mixture(folder):
    """Return data of three kinds, with a warm start: GSM8K's rows (the published ones if available), MATH as Parquet, and generated
    problems."""
    folder.mkdir(exist_ok=True)
    lines = GSM8K
    if not GSM8K.is_file():
        lines = folder / "train.jsonl"
        lines.write_text("\n".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(40)))
    parquet.write_table(pyarrow.table({"problem": ["2+3?", "1+1?"], "solution": [r"\boxed{5}", r"\boxed{2}"]}), folder / "math.parquet")
    return {
        "data.train": f'[{{source = "{lines}", weight = 3, name = "published"}}, {{source = "{TASK}"}}]',
        "data.eval": f'[{{source = "{folder}/math.parquet", format = "math", name = "math"}}, {{source = "{TASK}"}}]',
        "warm_start.steps": 2,
        "train.micro_batch_tokens": 1024,  # two or three samples
        "precision.kv": "e4m3_per_layer",
        "algorithm.kl_coef": 0.001,
        "checkpoint.every": 1,
        "checkpoint.keep": 2,
        "checkpoint.resume": "auto",
        "rollout.top_k": 100,
        "rollout.top_p": 0.9,
        "eval.samples": 2,
        "eval.top_p": 1.0,
        "rollout.max_total_tokens": 1 << 18,  # a cache of which one can see whether it is there
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    changes = mixture(folder)
    two_ranks = {**changes, "train.layout.tp": 2, "train.two_batch_overlap": "all", "train.steps": 500}
    with train_command.train(folder, two_ranks, launcher=train_command.TORCHRUN, config="gsm8k") as command:
        train_command.wait_for_rows(command, folder, 2)
        train_command.kill_engine(command)
        steps = len(read_rows(train_command.latest(folder)))
        train_command.wait_for_rows(command, folder, steps + 2)
        stopped = train_command.end_by(train_command.terminate, command)
    run = train_command.latest(folder)
    stopped_at = read_rows(run)[-1]["step"]
    moved = folder / "moved"
    shutil.copytree(folder / "model", moved / "model")
    changes |= mixture(moved) | {"model.path": moved / "model", "train.steps": stopped_at + 2, "train.micro_batch_tokens": 512}
    changes["rollout.max_new_tokens"] = 12
    refused = finish(train_command.train(folder, changes, config="gsm8k"))
    changes["checkpoint.allow_changes"] = '["rollout.max_new_tokens"]'
    finished = finish(train_command.train(folder, changes, config="gsm8k"))
    return Runs(run.resolve(), stopped, stopped_at, refused, finished)


def test_a_stop_leaves_a_checkpoint_from_which_another_layout_goes_on_in_the_same_folder(runs):
    assert runs.stopped.code != 0 and (runs.finished.code == 0), runs.stopped.err + runs.finished.err
    state = read_json(runs.run / "run.json")
    assert state["status"] == "finished" and [part["step"] for part in state["resumed"]] == [runs.stopped_at]
    assert len(list(runs.run.parent.glob("20*"))) == 1
    log = (runs.run / "run.log").read_text()
    assert "run broken: stopped by SIGTERM" in log
    assert "resuming from" in log and "resuming from" in runs.finished.out + runs.finished.err
    assert "it was written with another train.layout" in log
    assert len(list((runs.run / "tensorboard").glob("events.out.tfevents.*"))) == 2


def test_the_second_part_has_longer_answers_and_files_that_have_moved_and_says_so(runs):
    line = "rollout.max_new_tokens = 12: differs from the resumed run "
    assert runs.refused.code == 2 and line in runs.refused.err and len(runs.refused.err.splitlines()) == 1, runs.refused.err
    changes = {each["field"]: (each["before"], each["after"]) for each in read_json(runs.run / "run.json")["resumed"][0]["changes"]}
    assert changes["rollout.max_new_tokens"] == (8, 12) and changes["train.micro_batch_tokens"] == (1024, 512)
    assert {"model.path", "data.eval.0.source", "train.layout.tp", "train.steps"} <= changes.keys()
    assert f"from step {runs.stopped_at + 1} on, rollout.max_new_tokens is 12 instead of 8. " in (runs.run / "run.log").read_text()
    assert "Changes at resume" in (runs.run / "report.html").read_text()
    rows = read_rows(runs.run)
    assert rows[runs.stopped_at]["length/max"] <= 8 < rows[-1]["length/max"], "the model is random and rarely stops"


def test_the_engine_that_was_killed_is_replaced(runs):
    rows, log = read_rows(runs.run), (runs.run / "run.log").read_text()
    assert sum(row["engine/restarts"] for row in rows) == 1 and sum(row["time/recovery"] for row in rows) > 1
    assert "engine 0 is lost: " in log and "again, proved, " in log


def test_the_run_leaves_everything_behind(runs):
    run, rows, last = runs.run, read_rows(runs.run), runs.stopped_at + 2
    assert "report:" in runs.finished.out and "proof ok" in runs.finished.out + runs.finished.err
    assert (run.parents[1] / "warm_start" / "stdout").read_text().count("warm start: step 2/2") == 1, "of two ranks the first prints"
    assert [row["step"] for row in rows] == [row["policy_version"] for row in rows] == list(range(last + 1))
    for row in rows:
        assert row["sync/proved"] == row["sync/tensors"] == TENSORS + 1 and row["sync/bytes"] > 0, "one more: the scales of keys and values"
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in row.values()), row
    for row in rows[1:]:
        assert {"reward/mean", "loss/policy", "grad_norm", "update/abs_mean", "entropy", "time/step", "memory/train_mb"} <= row.keys()
        assert row["tokens/generated"] > 0 and row["mismatch/abs_mean"] < 1e-3 and "mismatch/k3_kl" in row
    assert {"eval/accuracy", "eval/pass@2", "eval/maj@2"} <= rows[0].keys() & rows[-1].keys()
    assert {sample["step"] for sample in read_rows(run, "samples.jsonl")} == set(range(1, last + 1))
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert "<html" in (run / "report.html").read_text()
    graphs = read_json(run / "graph.json")
    assert graphs["differences"] == [] and graphs["rollout"][0]["ranks"] == [0]
    assert sorted(folder.name for folder in (run / "checkpoints").iterdir()) == [f"step_{step:05d}" for step in (last - 1, last)]
    assert not list(Path("/dev/shm").glob(f"megatron-rl-{read_json(run / 'run.json')['pid']}-*"))


def test_a_mixture_of_data_sets_is_drawn_by_weight_and_scored(runs):
    """With weights 3 and 1, four problems are 3 and 1. Both held-out sets have their own metrics."""
    rows, samples = read_rows(runs.run), read_rows(runs.run, "samples.jsonl")
    assert all(row["reward/errors"] == 0 and row["reward/mean"] >= 0 for row in rows[1:])
    assert {"eval/source_math", "eval/source_arithmetic"} <= rows[0].keys() and {"accuracy/source_published"} <= rows[1].keys()
    questions = [sample["prompt"].removeprefix("Question: ").partition("\nAnswer:")[0] for sample in samples if sample["step"] == 1]
    assert 4 * sum(question.endswith("=") for question in questions) == len(questions) > 0
    assert all(float(sample["answer"]).is_integer() for sample in samples)


def test_on_shared_devices_the_engines_cache_takes_what_it_holds(runs):
    """Keys and values of all tokens would take 64 MiB each."""
    row = read_rows(runs.run)[-1]
    generate, train, sync = (row[f"memory/engine_{phase}_mb"] for phase in ("generate", "train", "sync"))
    assert train <= generate + 5 and max(generate, sync) - train < 50, row


def test_its_checkpoint_is_exported(runs, tmp_path):
    checkpoint = max((runs.run / "checkpoints").iterdir())
    export = ("megatron_rl", "export", "--checkpoint", checkpoint, "--precision", "fp8", "--output")
    done = finish(Command(tmp_path, *train_command.TORCHRUN, *export, tmp_path / "hf"))
    assert (done.code, done.out.strip()) == (0, f"checkpoint: {tmp_path / 'hf'}"), done.err
    weights = read_weights(tmp_path / "hf")
    assert str(weights["model.layers.0.mlp.down_proj.weight"].dtype) == "torch.float8_e4m3fn"
    assert weights["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (2, 4)
    assert read_json(tmp_path / "hf" / "config.json")["quantization_config"]["scale_fmt"] == "ue8m0"
    again = finish(Command(tmp_path / "again", *export, tmp_path / "hf"))
    assert again.code == 2 and "--output" in again.err and "exists already" in again.err


def test_a_wrong_world_size_is_one_line_before_anything_starts(tmp_path):
    done = finish(train_command.train(tmp_path, {"train.layout.tp": 2}))
    assert done.code == 2
    assert done.err.splitlines() == [
        "megatron-rl: train.layout: needs 2 ranks (tp * cp * pp * dp), but this launch has 1; "
        "start with torchrun --nproc-per-node 2, or change train.layout"
    ]
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_a_tokenizer_of_many_files_is_the_same_in_engine_checkpoint_and_export(tmp_path):
    """The end tokens are added ones, of which only added_tokens.json and the lists in two configs know. The engine ends at each."""
    model = make_checkpoint(tmp_path / "model")
    make_slow_tokenizer(model)
    edit_config(model, {"eos_token_id": 259})
    (model / "generation_config.json").write_text('{"eos_token_id": [257, 259]}')
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "consolidated.safetensors").write_bytes(b"not read")
    done = finish(train_command.train(tmp_path, {"rollout.max_new_tokens": 100, "checkpoint.every": 1}))
    assert done.code == 0, done.err
    run = train_command.latest(tmp_path)
    assert all(row["mismatch/abs_max"] == 0 for row in read_rows(run)[1:])
    assert (run / "run.log").read_text().count("consolidated.safetensors: not model.safetensors, nor named by its index") == 1
    export_checkpoint(run / "checkpoints" / "step_00002", tmp_path / "out", "bf16")
    for copy in (run / "engine_model", run / "checkpoints" / "step_00002" / "hf", tmp_path / "out"):
        check_copy(model, copy)
        kept = {str(file.relative_to(copy)): file.read_bytes() for file in list_kept_files(copy)}
        assert kept == {str(file.relative_to(model)): file.read_bytes() for file in list_kept_files(model)} and len(kept) == 7
    assert "stop" in {sample["finish_reason"] for sample in read_rows(run, "samples.jsonl")}
