"""Converts a tokenizer that is published as code over a tiktoken file (Kimi-K2, Moonlight, Qwen-1) to a tokenizer.json of the same rule:

    python -m megatron_rl.cli.convert_tokenizer FOLDER

The splitting pattern is read from the published code, which is not run. tokenizer.json and tokenizer_config.json are written into the
folder; the second keeps its former text in tokenizer_config.json.orig.
"""

import ast
import base64
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import TikTokenConverter

from megatron_rl.cli.main import run_script
from megatron_rl.config.reading import read_file, reading
from megatron_rl.errors import UserError
from megatron_rl.hf.files import read_object
from megatron_rl.observability.files import replace_file

_FIELD = "FOLDER"
_PATTERN_NAMES = ("pat_str", "PAT_STR")


class _Converter(TikTokenConverter):
    """Reads ranks without tiktoken."""

    @staticmethod
    def load_tiktoken_bpe(path: str) -> dict[bytes, int]:
        lines = read_file(Path(path)).decode("ascii").splitlines()
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in (line.split() for line in lines if line)}


def convert(folder: Path) -> None:
    """Write the tokenizer of a folder as tokenizer.json. Raise UserError if the folder has one already, or if files are missing or are
    not understood."""
    file, settings_file = folder / "tokenizer.json", folder / "tokenizer_config.json"
    if file.exists():
        raise UserError(_FIELD, str(folder), "holds a tokenizer.json already", "nothing needs to be converted")
    ranks_file = _find_one(folder, "tiktoken.model", "*.tiktoken")
    settings = read_object(settings_file, _FIELD)
    with reading(_FIELD, str(ranks_file), "download it again"):
        ranks = _Converter.load_tiktoken_bpe(str(ranks_file))
    added = {int(number): token for number, token in (settings.get("added_tokens_decoder") or {}).items()}
    if sorted(ranks.values()) != [*range(len(ranks))] or not added or min(added) < len(ranks):
        raise UserError(_FIELD, str(folder), "its special tokens do not follow the tokens of its tiktoken file", "download it again")
    tokenizer = _Converter(str(ranks_file), read_pattern(_find_one(folder, "tokenization_*.py"))).converted()
    for number in range(len(ranks), max(added) + 1):  # as the published code, which names the tokens between
        token = added.get(number, {"content": f"<|reserved_token_{number}|>", "special": True})
        added_token = AddedToken(token["content"], normalized=False, special=token["special"])
        (tokenizer.add_special_tokens if token["special"] else tokenizer.add_tokens)([added_token])
        if tokenizer.token_to_id(token["content"]) != number:
            raise UserError(_FIELD, str(folder), f"its token {number} ({token['content']}) has another number", "download it again")
    new = {name: value for name, value in settings.items() if name != "auto_map"} | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if not (kept := folder / "tokenizer_config.json.orig").exists():
        replace_file(kept, settings_file.read_text(encoding="utf-8"))
    replace_file(settings_file, json.dumps(new, indent=2, ensure_ascii=False) + "\n")
    replace_file(file, tokenizer.to_str())


def _find_one(folder: Path, *patterns: str) -> Path:
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    if len(found) != 1:
        raise UserError(_FIELD, str(folder), f"holds {len(found)} files named {' or '.join(patterns)}, not one", "download the model again")
    return found[0]


def read_pattern(code: Path) -> str:
    """Return the splitting pattern that published code assigns to `pat_str`: a text, or texts joined by a text."""
    with reading(_FIELD, str(code), "download it again"):
        try:
            tree = ast.parse(read_file(code))
        except SyntaxError as error:
            raise ValueError(error) from None
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in _PATTERN_NAMES:
                return _evaluate(node.value)
    raise UserError(_FIELD, str(code), f"assigns no {_PATTERN_NAMES[0]}", "use a model with tokenizer.json")


def _evaluate(node: Any) -> str:
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"), args=[ast.List(elts=parts)]):
            return between.join(map(_evaluate, parts))
        case ast.Constant(value=str(text)):
            return text
    raise ValueError(f"the pattern {ast.unparse(node):.80} is not a text")


def main(folder: Annotated[Path, typer.Argument(metavar=_FIELD, help="Folder of the model.")]) -> None:
    """Convert a tokenizer that is code over a tiktoken file to tokenizer.json."""
    convert(folder)
    print(f"wrote {folder / 'tokenizer.json'}")


if __name__ == "__main__":
    run_script(main)
