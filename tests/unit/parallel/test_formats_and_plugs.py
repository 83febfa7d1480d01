"""The table of number formats, and plugs: objects found by a built-in name or as module:attribute."""

import json

import pytest
import torch

from parallel.formats import BF16, FORMATS, FP8, FP32, INT8, MODES, TensorFormat
from parallel.plug import InputError, Plug


@pytest.mark.parametrize("format", [*FORMATS.values(), TensorFormat("e8m0", "float8_e8m0fnu"), TensorFormat("bytes", "uint8")], ids=str)
def test_bytes_and_names_follow_from_the_dtype(format, tmp_path):
    from safetensors.torch import safe_open, save_file

    values = torch.zeros(2, 4, dtype=getattr(torch, format.dtype))
    assert format.element_bytes == values.itemsize
    save_file({"x": values}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert file.get_slice("x").get_dtype() == format.safetensors_dtype


def test_scales_are_counted_by_the_grid_of_blocks():
    assert FP8.scale_grid(300, 128) == (3, 1) and INT8.scale_grid(300, 128) == (300, 1)
    assert (FP8.scale, FP8.scale_name("x.weight")) == (TensorFormat("scale", "float32"), "x.weight_scale_inv")
    assert FP8.count_bytes((4, 300, 128)) == 4 * (300 * 128 + 4 * 3) and INT8.count_bytes((300, 128)) == 300 * (128 + 4)
    assert BF16.count_bytes((300,)) == 600 and FP32.count_bytes((3, 2)) == 24
    assert FP8.group_bytes == 1 + 4 / 128 and INT8.group_bytes == 1


def test_quantization_config_and_every_mode_is_made_of_rows_of_the_table():
    pow2 = FP8.with_scales("pow2")
    assert str(pow2) == "fp8 pow2" and pow2.with_scales("fp32") == pow2 and INT8.with_scales("pow2") == INT8
    config = '{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], '
    config += '"modules_to_not_convert": ["lm_head"]'
    assert json.dumps(pow2.quantization_config()) == config + ', "scale_fmt": "ue8m0"}'
    assert json.dumps(FP8.with_scales("fp32").quantization_config()) == config + "}"
    assert INT8.quantization_config() == {"quant_method": "w8a8_int8", "is_dynamic": True} and BF16.quantization_config() == {}
    assert [format.engine_quantization for format in (FP8, INT8, BF16)] == ["fp8", "w8a8_int8", None]
    assert {side for mode in MODES.values() for side in mode} <= {None, *FORMATS.values()}
    assert len({hash(format) for format in FORMATS.values()}) == len(FORMATS)


PLUG = Plug("section.field", {"join": "os.path:join"}, takes=("a", "b"))
MODULE = """
def two(a, b): return a + b
def one(a): return a
async def later(a, b): return a
class Holder:
    two = staticmethod(two)
number = 3
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
    (tmp_path / "own_plugs.py").write_text(MODULE)
    (tmp_path / "broken_plugs.py").write_text("1 / 0")
    monkeypatch.chdir(tmp_path)


def test_builtin_names_and_modules_in_the_working_directory_are_found():
    assert PLUG.load("join")("a", "b") == "a/b"
    assert PLUG.load("own_plugs:two")(1, 2) == PLUG.load("own_plugs:Holder.two")(1, 2) == 3
    assert PLUG.check_name("own_plugs:two") == "own_plugs:two"


@pytest.mark.parametrize("name, rule", [
    ("jion", "must be one of join, or your own as module:attribute"),
    ("own_plugs:three", "AttributeError"),
    ("absent_plugs:two", "ModuleNotFoundError"),
    ("broken_plugs:two", "ZeroDivisionError"),
    ("own_plugs:one", "plain function of (a, b): too many positional arguments"),
    ("own_plugs:later", "plain function of (a, b)"),
    ("own_plugs:number", "plain function of (a, b)"),
])  # fmt: skip
def test_unsuitable_objects_are_refused_in_one_line(name, rule):
    with pytest.raises(InputError) as caught:
        PLUG.load(name)
    assert (caught.value.field, caught.value.value) == ("section.field", name)
    assert rule in caught.value.rule and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["jion", "a.b", ":x", "a:", "1a:b", "a b:c"])
def test_a_name_of_another_form_is_refused_without_an_import(name):
    with pytest.raises(ValueError, match="must be one of join"):
        PLUG.check_name(name)
