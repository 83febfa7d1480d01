"""Runs that are stopped, or lose their engine or a rank: they go on with the rows and bytes of an uninterrupted run, or end in one line."""

import pytest
import torch
from support import train_command
from support.fp8_checkpoints import with_random_blocks
from support.models import FP32, make_checkpoint, read_weights, write_model
from support.processes import ROOT, Command
from support.train_command import TINY, TORCHRUN, finish, latest, make_model, read_json, read_numbers, read_rows, train

from megatron_rl.precision.fp8 import dequantize_weight
from megatron_rl.precision.quantized_weight import QuantizedWeight

pytestmark = [pytest.mark.long, pytest.mark.timeout(6000)]
LEARNING = {
    "warm_start.batch_size": 16,
    "warm_start.steps": 80,  # so that some answers earn something, and the weights move
    "train.steps": 4,
    "rollout.group_size": 4,
    "data.settings.levels": "[1]",
    "checkpoint.every": 1,
    "checkpoint.keep": 2,
    "checkpoint.resume": "auto",
}
MEASURED = {  # over LEARNING: twelve problems in epochs of what is solved at times, easiest first, and groups trained on again
    "train.steps": 9,
    "data.train": '[{source = "examples.arithmetic.rows:list_problems", settings = {levels = [1], count = 12}, recheck_every = 3, '
    'columns = {question = "question", answer = "answer"}, curriculum = "pass_rate", pass_rate = "measured", pass_rate_low = 0.2}]',
    "algorithm.correction": "tis",
    "replay.prompts_per_step": 2,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {name: tmp_path_factory.mktemp(name) for name in ("straight", "stopped", "killed")}


@pytest.fixture(scope="module")
def runs(folders):
    """Results of three runs: uninterrupted, stopped after two steps and started again, and with its engine killed after the first step."""
    done = {"straight": finish(train(folders["straight"], LEARNING))}
    with train(folders["stopped"], LEARNING) as command:
        train_command.wait_for_rows(command, folders["stopped"], 3)
        done["stopped"] = train_command.end_by(train_command.terminate, command)
    done["started again"] = finish(train(folders["stopped"], LEARNING))
    with train(folders["killed"], LEARNING) as command:
        train_command.wait_for_rows(command, folders["killed"], 2)
        train_command.kill_engine(command)
        done["killed"] = command.wait(train_command.LONG)
    return done


def test_the_rows_are_those_of_the_run_that_nothing_happened_to(runs, folders):
    assert {name: done.code for name, done in runs.items()} == {"straight": 0, "stopped": 143, "started again": 0, "killed": 0}, runs
    straight, stopped, killed = (latest(folders[name]) for name in ("straight", "stopped", "killed"))
    assert len(list(stopped.parent.glob("20*"))) == 1, "it goes on in its own folder"
    rows = read_numbers(straight)
    assert rows == read_numbers(stopped) == read_numbers(killed)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[4]["grad_norm"] > 0 and rows[4]["sync/proved"] == 15
    assert sum(row["reward/std"] > 0 for row in rows[1:]) >= 2
    samples = read_rows(straight, "samples.jsonl")
    assert samples == read_rows(stopped, "samples.jsonl") and len(samples) == 4 * 8
    assert sum(row["engine/restarts"] for row in read_rows(killed)) == 1


def test_the_engines_bytes_are_those_of_the_run_that_nothing_happened_to(runs, folders, tmp_path):
    for name, folder in folders.items():
        checkpoints = latest(folder) / "checkpoints"
        assert sorted(step.name for step in checkpoints.iterdir()) == ["step_00003", "step_00004"]
        arguments = ("--checkpoint", checkpoints / "step_00004", "--output", tmp_path / name, "--precision", "fp8")
        done = finish(Command(tmp_path / f"log_{name}", "megatron_rl", "export", *arguments))
        assert done.code == 0, done.err
    straight, *others = (read_weights(tmp_path / name) for name in folders)
    for other in others:
        assert len(straight) == 21 and straight.keys() == other.keys()
        assert [name for name in straight if not torch.equal(straight[name].view(torch.uint8), other[name].view(torch.uint8))] == []


def test_a_trainer_that_is_killed_goes_on_with_the_problems_and_kept_groups_of_the_run_that_nothing_happened_to(tmp_path):
    settings = LEARNING | {"model.path": tmp_path / "model"}
    train_command.make_model(tmp_path, train_command.TINY | settings)
    settings |= MEASURED
    assert (done := finish(train(tmp_path / "straight", settings))).code == 0, done.err
    with train(tmp_path / "killed", settings) as command:
        train_command.wait_for_rows(command, tmp_path / "killed", 6)
        assert train_command.end_by(train_command.kill_trainer, command).code == -9
    assert (done := finish(train(tmp_path / "killed", settings))).code == 0, done.err
    straight, killed = (latest(tmp_path / name) for name in ("straight", "killed"))
    rows = read_numbers(straight)
    assert rows == read_numbers(killed) and len(rows) == 10 and read_json(killed / "run.json")["resumed"]
    assert read_rows(straight, "samples.jsonl") == read_rows(killed, "samples.jsonl")
    assert max(row["data/left_out_list_problems"] for row in rows[1:]) > 0 and max(row["replay/groups"] for row in rows[1:]) == 2


def test_a_run_over_pipeline_stages_whose_rank_is_killed_ends_the_other_and_the_engine(tmp_path):
    stages = {"train.layout.pp": 2, "architecture.num_hidden_layers": 2, "train.steps": 500}
    with train(tmp_path, stages, launcher=TORCHRUN) as command:
        train_command.wait_for_rows(command, tmp_path, 3)
        done = train_command.end_by(train_command.kill_rank_1, command)
    assert done.code != 0
    assert [(row["sync/proved"], row["sync/tensors"]) for row in read_rows(latest(tmp_path))[:3]] == [(27, 27)] * 3
    state = read_json(latest(tmp_path) / "run.json")
    assert state["status"] == "broken" and state["reason"].startswith("another trainer rank is gone ("), state["reason"]
    assert f"megatron-rl: {state['reason']}" in done.err


def test_ranks_train_while_the_engine_generates_for_the_next_step(tmp_path):
    ahead = {"train.layout.tp": 2, "placement.kind": "disaggregated", "placement.max_staleness": 1, "algorithm.correction": "tis"}
    done = finish(train(tmp_path, ahead, launcher=TORCHRUN))
    assert done.code == 0, done.err
    _, first, second = read_rows(latest(tmp_path))
    assert (first["staleness/max"], second["staleness/max"]) == (0, 1)
    assert all({"ahead/generate", "ahead/reward", "staleness/mean"} <= row.keys() for row in (first, second))


def test_a_run_whose_engine_is_killed_without_a_restart_left_keeps_what_it_had(tmp_path):
    with train(tmp_path, {"train.steps": 500, "rollout.max_restarts": 0}) as command:
        train_command.wait_for_rows(command, tmp_path, 3)
        done = train_command.end_by(train_command.kill_engine, command)
    run = latest(tmp_path)
    assert done.code == 3, done.err
    line = done.err.splitlines()[-1]
    assert line.startswith("megatron-rl: the engine") and "engine.log" in line and "Traceback" not in line
    state = read_json(run / "run.json")
    assert state["status"] == "broken" and state["reason"] in line
    assert (run / "report.html").is_file()
    (checkpoint,) = (run / "checkpoints").iterdir()
    version = read_json(checkpoint / "state.json")["policy_version"]
    assert checkpoint.name == f"step_{version:05d}"
    # the engine may die in a sync, when the trainer is one version ahead of the last row
    assert version - read_rows(run)[-1]["policy_version"] in (0, 1)


def test_the_graph_of_fp8_rollout_shows_where_the_engine_quantizes_and_the_trainer_does_not(tmp_path):
    model = make_checkpoint(tmp_path / "model", num_hidden_layers=2)
    config = (ROOT / "configs" / "quickstart.toml", f"--model.path={model}", "--precision.mode=fp8_rollout")
    done = finish(Command(tmp_path, "megatron_rl", "graph", *config, "--svg", tmp_path / "g.svg", "--json", tmp_path / "g.json"))
    assert done.code == 1, done.err
    line = "layers 0..1: mlp.down.weight -> mlp.down (weight) is e4m3 128x128 pow2 in the rollout, fp32 in training"
    assert line in done.out and line in read_json(tmp_path / "g.json")["differences"]
    assert "8&#160;differences" in (tmp_path / "g.svg").read_text()


def test_an_fp8_checkpoint_with_float_scales_is_trained_from_its_own_blocks(tmp_path):
    """As DeepSeek-V3 and Qwen3-FP8 are published. After steps of 1e-12, the exported values are still the checkpoint's."""
    changes = {"precision.scale_format": "fp32", "train.learning_rate": 1e-12, "algorithm.entropy_coef": 0.01, "precision.high": "bf16"}
    changes["precision.masters"] = "stored"  # spread masters may lie next to the edge of their interval
    make_model(tmp_path, {**TINY, **changes, "model.path": tmp_path / "model"})
    with_random_blocks(tmp_path / "model", "fp32", seed=1)
    done = finish(train(tmp_path, changes))
    assert done.code == 0, done.err
    rows = read_rows(latest(tmp_path))
    assert all(row["mismatch/abs_max"] == 0 < row["grad_norm"] and row["sync/proved"] == row["sync/tensors"] for row in rows[1:])
    checkpoint, output = latest(tmp_path) / "checkpoints" / "step_00002", tmp_path / "exported"
    done = finish(Command(tmp_path, "megatron_rl", "export", "--checkpoint", checkpoint, "--output", output, "--precision", "fp8"))
    assert done.code == 0, done.err
    source, exported = read_weights(tmp_path / "model"), read_weights(output)
    quantized = [name for name, tensor in source.items() if tensor.dtype == torch.float8_e4m3fn]
    for name in quantized:
        values = (dequantize_weight(QuantizedWeight(side[name], side[f"{name}_scale_inv"])) for side in (source, exported))
        torch.testing.assert_close(*values, rtol=1e-6, atol=1e-9)
    assert len(quantized) == 7


_MOONLIGHT = {"q_lora_rank": None, "n_shared_experts": 2, "rope_theta": 50000.0, "rms_norm_eps": 1e-5, "num_experts_per_tok": 6}
_KIMI = {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
_YARN = {"type": "yarn", "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    "changes, tensors",
    [
        (_MOONLIGHT | {"routed_scaling_factor": 2.446}, 39),
        (_KIMI | {"routed_scaling_factor": 2.827, "rope_scaling": _YARN | {"original_max_position_embeddings": 128}}, 41),
    ],
    ids=["moonlight", "kimi_k2"],
)
def test_moonlight_and_kimi_are_deepseek_v3_with_other_values(changes, tensors, tmp_path):
    write_model(tmp_path / "model", "deepseek_v3", FP32, **changes, n_group=1, topk_group=1)
    done = finish(train(tmp_path))
    assert done.code == 0, done.err
    rows = read_rows(latest(tmp_path))
    assert [(row["mismatch/abs_max"], row["sync/proved"], row["sync/tensors"]) for row in rows[1:]] == [(0, tensors, tensors)] * 2


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "glm4_moe"])  # covering rows and engine tests have others
def test_yarn_beyond_the_lengths_of_its_table(family, tmp_path):
    """The engine's table starts with factor * original_max_position_embeddings = 32 positions and grows to the model's 512."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    write_model(tmp_path / "model", family, FP32, rope_scaling=scaling)
    done = finish(train(tmp_path, {"rollout.max_new_tokens": 64, "algorithm.entropy_coef": 0.01}))
    assert done.code == 0, done.err
    rows = read_rows(latest(tmp_path))[1:]
    assert len(rows) == 2 and all(row["mismatch/abs_max"] == 0 < row["grad_norm"] for row in rows)
    assert all(row["sync/proved"] == row["sync/tensors"] > 0 for row in rows)
    assert all(row["length/max"] == 64 for row in rows)
    checkpoint, output = latest(tmp_path) / "checkpoints" / "step_00002", tmp_path / "exported"
    done = finish(Command(tmp_path, "megatron_rl", "export", "--checkpoint", checkpoint, "--output", output))
    assert done.code == 0, done.err
    assert read_json(output / "config.json")["rope_scaling"] == scaling
