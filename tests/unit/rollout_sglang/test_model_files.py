"""An engine imports the files of its own model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from rollout_sglang.launch_args import DISABLED_MODELS_VARIABLE, leave_out_other_models

FOLDER = Path(find_spec("sglang").origin).parent / "srt" / "models"
FILES = {file.stem for file in FOLDER.glob("*.py")}
OWN = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV3ForCausalLM": "deepseek_v2",
}


@pytest.mark.parametrize("architecture", OWN)
def test_the_file_that_defines_the_model_stays_and_the_others_are_left_out(architecture):
    left_out = set(leave_out_other_models([architecture])[DISABLED_MODELS_VARIABLE].split(","))
    assert OWN[architecture] in FILES - left_out and left_out < FILES and len(left_out) > 100
    for name in FILES - left_out - {OWN[architecture]}:
        text = (FOLDER / f"{name}.py").read_text()
        assert f"class {architecture}" in text or "\nclass " not in text, name


@pytest.mark.parametrize("architectures", [[], ["UnknownForCausalLM"]])
def test_for_a_model_that_no_file_defines_nothing_is_left_out(architectures):
    assert leave_out_other_models(architectures) == {}
