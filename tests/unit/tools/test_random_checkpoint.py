"""Random checkpoints are written file by file, with the same weights for any size of a file."""

import pytest
from harness import write_random_checkpoint
from safetensors.torch import load_file
from support.families import ARCHITECTURES, CLASSES


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_files_hold_the_same_weights_whatever_their_size(family, tmp_path):
    """The parts of a stack, such as gpt-oss's experts, are one tensor of one file."""
    found = {}
    for name, size in (("one", 1 << 30), ("many", 1)):
        (folder := tmp_path / name).mkdir()
        write_random_checkpoint(folder, ARCHITECTURES[family] | {"architectures": [CLASSES[family]]}, file_bytes=size)
        files = sorted(folder.glob("*.safetensors"))
        found[name] = {key: tensor for file in files for key, tensor in load_file(file).items()}
        assert len(files) == (1 if name == "one" else len(found[name]))
    assert found["one"].keys() == found["many"].keys()
    assert all(tensor.equal(found["many"][key]) for key, tensor in found["one"].items())
    assert len({tensor.float().std().item() for tensor in found["one"].values()}) > 3, "random"
