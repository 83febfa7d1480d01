"""The command `eval` before an engine starts: refusals, and the preparation of each kind of checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
from support.models import edit_config, make_checkpoint
from typer.testing import CliRunner

from megatron_rl.cli import evaluate
from megatron_rl.cli.evaluate import EvalRequest
from megatron_rl.cli.main import app
from megatron_rl.config import Config, load_config
from megatron_rl.errors import UserError
from megatron_rl.evaluation.checkpoint import check_checkpoint
from megatron_rl.hf.files import list_kept_files, read_config
from megatron_rl.mcore.checkpoint.export import convert

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def fp8(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exports") / "fp8"
    convert(model, folder, {"mode": "fp8_unified"})
    return folder


def config(**precision: object) -> Config:
    sections = {"model": {"path": "nowhere"}, "data": {"max_prompt_tokens": 64}, "rollout": {"max_new_tokens": 8}, "precision": precision}
    return Config.model_validate(sections, strict=False)


def write_run_checkpoint(folder: Path, model: Path, **precision: object) -> Path:
    """Write a run's checkpoint without its weights, which these tests do not read."""
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "config.json").write_text((model / "config.json").read_text())
    for file in list_kept_files(model):
        (folder / "hf" / file.name).write_text(file.read_text())
    (folder / "state.json").write_text(json.dumps({"step": 30, "precision": precision}))
    return folder


@pytest.mark.parametrize("options, line", [
    (["--samples", "0"], "eval.samples = 0: must be greater than or equal to 1"),
    (["--samples", "2000"], "eval.samples = 2000: must be less than or equal to 1024"),
    (["--at", "1,8", "--samples", "4", "--eval.temperature=1"], "--at = '1,8': requires 8 completions per problem, but there are 4; "),
    (["--at", "0"], "--at = '0': must be positive integers separated by commas; write for example --at 1,8,64"),
    (["--at", "two"], "--at = 'two': must be positive integers separated by commas; write for example --at 1,8,64"),
    (["--greedy", "--samples", "4"], "eval: the 4 samples of a problem would be identical at temperature 0; set samples = 1"),
    (["--data.eval="], "data.eval: is empty, so there is nothing to evaluate; set it to held-out problems"),
    (["--baseline", "gone"], "--baseline = 'gone': does not exist; give a folder like RUN_DIR/checkpoints/step_00030, a Hugging"),
    (["--baseline", "empty"], "--baseline = 'empty': holds no state.json; give a folder like RUN_DIR/checkpoints/step_00030"),
    (["--output", "full"], "--output = 'full': exists and is not an empty folder; use a new folder"),
    (["--data.eval", "none.jsonl"], "data.eval = 'none.jsonl': does not exist"),
    (["--precision.mode=bf16", "--precision.kv=e4m3_per_layer"], "precision.kv = 'e4m3_per_layer': needs scales that only a trainer"),
])  # fmt: skip
def test_user_errors_are_one_line_before_an_engine_starts(options, line, model, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "start_engines", None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "eval.json").touch()
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["eval", str(ROOT / "configs/quickstart.toml"), "--checkpoint", str(model), *options])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith(f"megatron-rl: {line}") and done.stderr.count("\n") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"empty", "full"}


def test_checkpoints_that_the_engine_can_load_are_not_converted(model, fp8):
    assert check_checkpoint(model, "--checkpoint", config(mode="bf16", high="fp32")).loads_directly
    assert check_checkpoint(fp8, "--checkpoint", config(mode="fp8_unified")).loads_directly
    assert check_checkpoint(fp8, "--checkpoint", config(mode="fp8_rollout")).loads_directly
    assert not check_checkpoint(model, "--checkpoint", config(mode="fp8_unified")).loads_directly
    assert not check_checkpoint(fp8, "--checkpoint", config(mode="bf16")).loads_directly


def test_an_engine_gets_the_resolved_config_of_a_checkpoint_that_it_can_load(model, tmp_path):
    shutil.copytree(model, copy := tmp_path / "copy")
    edit_config(copy, {"architectures": ["Qwen2ForCausalLM"], "scale_emb": None})
    plain = config(mode="bf16", high="fp32")
    assert check_checkpoint(model, "--checkpoint", plain).prepare(plain, tmp_path / "none") == model
    prepared = check_checkpoint(copy, "--checkpoint", plain).prepare(plain, tmp_path / "prepared")
    assert read_config(prepared) == read_config(model)
    assert {file.name for file in prepared.iterdir()} == {file.name for file in model.iterdir()}


@pytest.mark.parametrize("mode, quantized", [("fp8_unified", "fp8"), ("int8_rollout", "w8a8_int8")])
def test_a_hugging_face_checkpoint_is_quantized_for_the_engine(mode, quantized, model, tmp_path):
    quantizing = config(mode=mode)
    prepared = check_checkpoint(model, "--checkpoint", quantizing).prepare(quantizing, tmp_path / "prepared")
    assert prepared == tmp_path / "prepared"
    assert read_config(prepared)["quantization_config"]["quant_method"] == quantized
    assert check_checkpoint(prepared, "--checkpoint", quantizing).loads_directly


def test_quantized_weights_are_not_quantized_again(model, fp8, tmp_path):
    line = "--baseline = .* is FP8, but the config's engine is w8a8_int8, and quantized weights are never quantized twice"
    with pytest.raises(UserError, match=line):
        check_checkpoint(fp8, "--baseline", config(mode="int8_rollout"))
    with pytest.raises(UserError, match="precision.scale_format = 'fp32': .* is FP8 with pow2 scales; set it to \"pow2\""):
        check_checkpoint(fp8, "--baseline", config(scale_format="fp32"))
    saved = write_run_checkpoint(tmp_path / "step_00030", model, mode="fp8_unified", scale_format="pow2")
    with pytest.raises(UserError, match="the checkpoint's blocks have pow2 scales"):
        check_checkpoint(saved, "--checkpoint", config(scale_format="fp32"))
    result = check_checkpoint(saved, "--checkpoint", config(mode="int8_rollout", scale_format="fp32"))
    assert (result.step, result.loads_directly, result.tokenizer) == (30, False, saved / "hf")


def test_errors_in_checkpoints_name_the_option(model, tmp_path):
    broken = make_checkpoint(tmp_path / "broken")
    edit_config(broken, {"intermediate_size": 1024})
    with pytest.raises(UserError, match=r"^--baseline = .*has shape .*config.json says"):
        check_checkpoint(broken, "--baseline", config())
    saved = write_run_checkpoint(tmp_path / "step_00030", model)
    (saved / "state.json").write_text("{")
    with pytest.raises(UserError, match="^--baseline = .*state.json': cannot be read \\(JSONDecodeError"):
        check_checkpoint(saved, "--baseline", config())


def test_results_are_written_to_the_run_of_the_checkpoint_for_these_values_of_k(model, tmp_path):
    run = tmp_path / "runs" / "one"
    saved = write_run_checkpoint(run / "checkpoints" / "step_00030", model)
    (run / "run.json").touch()
    side = check_checkpoint(saved, "--checkpoint", config())
    folders = [evaluate.choose_output_folder(config(), EvalRequest(saved), side) for _ in range(2)]
    assert folders == [run / "eval" / "step_00030", run / "eval" / "step_00030-2"]
    logged = config().model_copy(update={"log": config().log.model_copy(update={"dir": tmp_path / "logs"})})
    published = check_checkpoint(model, "--checkpoint", config())
    assert evaluate.choose_output_folder(logged, EvalRequest(model), published) == tmp_path / "logs" / "eval" / model.name
    assert [EvalRequest(Path()).list_ks(samples) for samples in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4, 6]]
    assert EvalRequest(Path(), at="8, 1,8").list_ks(8) == [1, 8]
    assert load_config(ROOT / "configs/quickstart.toml").data.eval  # evaluated by the tests above
