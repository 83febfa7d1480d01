"""Whole runs through the command line: what they leave behind, how they end when something breaks, and that nothing outlives them."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet
from support.models import read_weights
from support.processes import ROOT, Command, Done, alive_after, command_lines, end, family, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # five runs of at most 320 s, two at a time

GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", 2, "-m")
SMALL = {  # over configs/quickstart.toml
    "model.warm_start.steps": 0,
    "model.create.num_hidden_layers": 1,
    "train.steps": 2,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 8,
    "rollout.max_running_requests": 16,
    "rollout.max_total_tokens": 4096,
    "rollout.start_timeout": 240,
    "data.eval_size": 4,
    "reward.workers": 1,
    "sync.bucket_mb": 1,
}
TWO_STAGES = {"train__layout__pp": 2, "model__create__num_hidden_layers": 2}
TWO_RANKS = {"train__layout__tp": 2, "placement__kind": "disaggregated", "placement__max_staleness": 1, "algorithm__correction": "tis"}


def train(folder: Path, *, config: str = "quickstart", before: tuple = (), **changes: object) -> Command:
    """`megatron-rl train` with a tiny model that is made from random numbers; `section__key=value` changes the configuration."""
    wanted = {**SMALL, "model.path": folder / "model", "log.dir": folder / "runs"}
    wanted |= {name.replace("__", "."): value for name, value in changes.items()}
    overrides = [f"--{name}={value}" for name, value in wanted.items()]
    return Command(folder, *before, "megatron_rl", "train", ROOT / "configs" / f"{config}.toml", *overrides)


def finish(command: Command, seconds: float = 320) -> Done:
    with command:
        return command.wait(seconds)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, tuple[Path, Done]]:
    """Five runs, two at a time as there may be two cores only: name -> (folder of the run, how the command ended)."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("killed", "plain", "two_ranks", "two_stages", "mixture")}
    with ThreadPoolExecutor(2) as pool:
        work = {
            "killed": pool.submit(lambda: run_and_kill_its_engine(folders["killed"])),
            "plain": pool.submit(lambda: finish(train(folders["plain"], rollout__max_total_tokens=1 << 16))),
            "two_ranks": pool.submit(lambda: finish(train(folders["two_ranks"], before=TORCHRUN, **TWO_RANKS))),
            "two_stages": pool.submit(lambda: finish(train(folders["two_stages"], before=TORCHRUN, **TWO_STAGES))),
        }
        mixed = several_sets(folders["mixture"])
        work["mixture"] = pool.submit(lambda: finish(train(folders["mixture"], config="gsm8k", **mixed)))
        return {name: (folders[name] / "runs" / "latest", future.result()) for name, future in work.items()}


def several_sets(folder: Path) -> dict[str, object]:
    """A run on sets of three kinds: GSM8K's rows (the published ones where they are there), MATH's as Parquet, generated; a warm start, and
    an INT8 engine."""
    if not GSM8K.is_file():
        made = [json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) for n in range(40)]
        (folder / "train.jsonl").write_text("\n".join(made))
    lines = GSM8K if GSM8K.is_file() else folder / "train.jsonl"
    parquet.write_table(pyarrow.table({"problem": ["2+3?", "1+1?"], "solution": [r"\boxed{5}", r"\boxed{2}"]}), folder / "math.parquet")
    return {
        "data__train": f'[{{source = "{lines}", weight = 3, name = "published"}}, {{source = "arithmetic"}}]',
        "data__eval": f'[{{source = "{folder}/math.parquet", format = "math", name = "math"}}, {{source = "arithmetic"}}]',
        "model__warm_start__steps": 2,
        "precision__mode": "int8_rollout",
        "train__steps": 1,
        "rollout__prompts_per_step": 8,
        "rollout__max_total_tokens": 8192,
    }


def run_and_kill_its_engine(folder: Path) -> Done:
    """Kills the engine's server after two steps, with no restart allowed. Raises AssertionError when anything of the run is left
    afterwards."""
    with train(folder, train__steps=500, rollout__max_restarts=0) as command:
        metrics = folder / "runs" / "latest" / "metrics.jsonl"
        until(lambda: command.ended() or (metrics.is_file() and len(metrics.read_text().splitlines()) >= 3), 150, "two steps")
        everything = family(command.pid)
        end(process for process, words in command_lines(everything).items() if "rollout_sglang.server" in words)
        done = command.wait(60)
        assert command_lines(alive_after(everything, 5)) == {}
        return done


def rows(run: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def read_run(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


@pytest.mark.parametrize("name, tensors", [("plain", 15), ("two_ranks", 15), ("two_stages", 27)])
def test_a_run_leaves_everything_behind(runs, name, tensors):
    run, done = runs[name]
    assert done.code == 0, done.err
    assert "run folder:" in done.out and "proof ok" in done.out + done.err
    assert read_run(run)["status"] == "finished"
    assert [row["step"] for row in rows(run)] == [0, 1, 2]
    assert [row["policy_version"] for row in rows(run)] == [0, 1, 2]
    for row in rows(run):
        assert row["sync/proved"] == row["sync/tensors"] == tensors and row["sync/bytes"] > 0
        assert all(isinstance(value, int | float) and math.isfinite(value) for value in row.values()), row
    for row in rows(run)[1:]:
        assert {"reward/mean", "loss/policy", "loss/kl", "grad_norm", "entropy", "time/step", "memory/train_mb"} <= row.keys()
        assert row["tokens/generated"] > 0
        if row.get("staleness/share") != 1:  # else no token is of the trainer's own version
            assert row["mismatch/abs_mean"] < 1e-3 and "mismatch/k3_kl" in row
    assert "eval/accuracy" in rows(run)[0] and "eval/accuracy" in rows(run)[2]
    assert {sample["step"] for sample in rows(run, "samples.jsonl")} == {1, 2}
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert "<html" in (run / "report.html").read_text()
    graphs = json.loads((run / "graph.json").read_text())
    assert graphs["differences"] == [] and graphs["rollout"][0]["ranks"] == [0]
    assert [folder.name for folder in (run / "checkpoints").iterdir()] == ["step_00002"]
    assert not list(Path("/dev/shm").glob(f"megatron-rl-{read_run(run)['pid']}-*"))


def test_on_shared_devices_the_engine_has_its_cache_in_its_own_turn_only(runs):
    """64 MiB for each of keys and values, written once a sync has given them back."""
    row = rows(runs["plain"][0])[2]
    assert row["memory/engine_generate_mb"] - row["memory/engine_train_mb"] > 100, row
    assert row["memory/engine_sync_mb"] - row["memory/engine_train_mb"] > 100, row


def test_ranks_may_train_while_the_engine_generates_for_the_next_step(runs):
    first, second = rows(runs["two_ranks"][0])[1:]
    assert (first["staleness/max"], second["staleness/max"]) == (0, 1)
    assert all({"ahead/generate", "ahead/reward", "staleness/mean"} <= row.keys() for row in (first, second))


def test_a_runs_checkpoint_is_exported(runs, tmp_path):
    checkpoint = runs["plain"][0] / "checkpoints" / "step_00002"
    export = ("megatron_rl", "export", "--checkpoint", checkpoint, "--precision", "fp8", "--output")
    done = finish(Command(tmp_path, *export, tmp_path / "hf"))
    assert (done.code, done.out.strip()) == (0, f"checkpoint: {tmp_path / 'hf'}"), done.err
    weights = read_weights(tmp_path / "hf")
    assert str(weights["model.layers.0.mlp.down_proj.weight"].dtype) == "torch.float8_e4m3fn"
    assert weights["model.layers.0.mlp.down_proj.weight_scale_inv"].shape == (2, 4)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]["scale_fmt"] == "ue8m0"
    again = finish(Command(tmp_path / "again", *export, tmp_path / "hf"))
    assert again.code == 2 and "--output" in again.err and "exists already" in again.err


def test_the_graph_of_fp8_rollout_shows_where_the_engine_quantises_and_the_trainer_does_not(tmp_path):
    config = (ROOT / "configs" / "quickstart.toml", f"--model.path={tmp_path / 'none'}", "--precision.mode=fp8_rollout")
    with Command(tmp_path, "megatron_rl", "graph", *config, "--svg", tmp_path / "g.svg", "--json", tmp_path / "g.json") as command:
        done = command.wait(200)
    assert done.code == 1, done.err
    line = "layers 0..1: mlp.down.weight -> mlp.down (weight) is e4m3 128x128 pow2 in the rollout, fp32 in training"
    assert line in done.out and line in json.loads((tmp_path / "g.json").read_text())["differences"]
    assert "8 differences" in (tmp_path / "g.svg").read_text()
    assert not (tmp_path / "none").exists()


def test_a_mixture_with_math_verify(runs):
    """Weights 3 and 1 give 6 and 2 of 8 problems; both held-out sets are told apart."""
    run, done = runs["mixture"]
    assert done.code == 0, done.err
    assert "warm start: step 2/2" in done.out + done.err
    first, row = rows(run)
    assert row["reward/errors"] == 0 and row["reward/mean"] >= 0 and row["tokens/generated"] > 0
    assert {"eval/source_math", "eval/source_arithmetic"} <= first.keys() and {"accuracy/source_published"} <= row.keys()
    samples = rows(run, "samples.jsonl")
    asked = [sample["prompt"].removeprefix("Question: ").partition("\nAnswer:")[0] for sample in samples]
    assert len(samples) == 8 and sum(question.endswith("=") for question in asked) == 2
    assert all(float(sample["answer"]).is_integer() for sample in samples)


def test_a_run_whose_engine_is_killed_keeps_what_it_had(runs):
    run, done = runs["killed"]
    assert done.code == 3, done.err
    line = done.err.splitlines()[-1]
    assert line.startswith("megatron-rl: the engine") and "engine.log" in line
    assert "Traceback" not in line
    assert read_run(run)["status"] == "broken"
    assert read_run(run)["reason"] in line
    assert (run / "report.html").is_file()
    (checkpoint,) = (run / "checkpoints").iterdir()
    version = json.loads((checkpoint / "state.json").read_text())["policy_version"]
    assert checkpoint.name == f"step_{version:05d}"
    # the engine may die in a sync, when the trainer is one version ahead of the last row
    assert version - rows(run)[-1]["policy_version"] in (0, 1)


def test_a_wrong_world_size_is_one_line_before_anything_starts(tmp_path):
    done = finish(train(tmp_path, train__layout__tp=2), 30)
    assert done.code == 2
    assert done.err.splitlines() == [
        "megatron-rl: train.layout: needs 2 ranks (tp * cp * pp * dp), this launch has 1; "
        "start with torchrun --nproc-per-node 2, or change train.layout"
    ]
    assert not (tmp_path / "runs").exists() and not (tmp_path / "model").exists()
