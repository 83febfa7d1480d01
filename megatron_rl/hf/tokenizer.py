"""Loads the tokenizer of a checkpoint folder with transformers, and compares the tokenizer of a copy with the source's."""

import hashlib
import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_rl.errors import UserError
from megatron_rl.hf.files import list_kept_files, read_object, refuse_pointers
from parallel.families import ALIASES, FAMILIES

_FIX = "add tokenizer.json and tokenizer_config.json of the original model"
_PLAIN = "1 + 1 = 2"
_PROBE = "1 + 1 = 2\n\tUn élève, 東京\u3000🙂  def f(x):\r\n    return x**2  # <b>x</b>"


def load_tokenizer(folder: Path, field: str = "model.path") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder from local files only. Raises UserError, naming `field`, if the folder is missing, holds no
    usable tokenizer, or its tokenizer has no end token."""
    if not os.path.isdir(folder):
        raise UserError(field, str(folder), "must be the folder of a Hugging Face checkpoint", "give an existing folder")
    refuse_pointers(folder, field)
    family = _check_configs(folder, field)
    _refuse_code(folder, field)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **family)
        ids = tokenizer.encode(_PLAIN, add_special_tokens=False)
        end = tokenizer.eos_token_id
    except BaseException as error:  # transformers raises OSError, ValueError, KeyError or a bare Exception, depending on what is wrong
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # from the Rust code of tokenizers
            raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if isinstance(error, KeyError):  # says no more than a name
            reason = f"it lacks {reason}"
        elif not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
            reason = "it has no tokenizer.json"
        raise UserError(field, str(folder), f"holds no usable tokenizer ({reason[:200]})", _FIX) from error
    if not set(ids) - {tokenizer.unk_token_id}:  # transformers makes an empty tokenizer from config.json alone
        raise UserError(field, str(folder), "holds no usable tokenizer (it has no tokens for a text)", _FIX)
    template = tokenizer.chat_template
    if not all(isinstance(text, str | type(None)) for text in (template.values() if isinstance(template, dict) else [template])):
        raise UserError(field, str(folder), "its chat template is not a text", "correct chat_template in tokenizer_config.json")
    if end is None:
        raise UserError(field, str(folder), "its tokenizer has no end token", "set eos_token in tokenizer_config.json")
    file = folder / "tokenizer.json"
    # for some classes, transformers takes only the vocabulary from tokenizer.json: a byte-level one then loses all blanks
    loses = tokenizer.decode(ids).strip() != _PLAIN and os.path.isfile(file)
    if loses and Tokenizer.from_file(str(file)).encode(_PLAIN, add_special_tokens=False).ids != ids:
        rule = f"transformers reads its tokenizer.json as {type(tokenizer).__name__}, which encodes other tokens than the file says"
        raise UserError(field, str(folder), rule, 'set "tokenizer_class" to "PreTrainedTokenizerFast" in tokenizer_config.json')
    _add_bos(tokenizer, folder / "tokenizer_config.json", field)
    return tokenizer


def _refuse_code(folder: Path, field: str) -> None:
    """Raise UserError, naming `field`, for a tokenizer whose rule for splitting is code, as Kimi-K2's: transformers would load its files
    with a rule of its own, and trainer and engine would agree on wrong tokens."""
    path = folder / "tokenizer_config.json"
    auto_map = (read_object(path, field) if os.path.isfile(path) else {}).get("auto_map")
    ranks = next(iter([*folder.glob("tiktoken.model"), *folder.glob("*.tiktoken")]), None)
    coded = isinstance(auto_map, dict) and auto_map.get("AutoTokenizer")
    if not os.path.isfile(folder / "tokenizer.json") and (coded or ranks):
        how = f"run `python -m megatron_rl.cli.convert_tokenizer {folder}` (of a hub model, download it into a folder first)"
        rule = "its tokenizer is published as code, without tokenizer.json, and no code of a model is run"
        raise UserError(field, str(folder), rule, how if ranks else "use a copy of the model with tokenizer.json")


def _check_configs(folder: Path, field: str) -> dict[str, Any]:
    """Raise UserError, naming `field`, if transformers, and so an engine, cannot read the configs in a folder. Return the argument by which
    transformers takes a model for one of the family of which it has another name, if it has."""
    path = folder / "config.json"
    model_type = str(read_object(path, field).get("model_type")) if os.path.isfile(path) else ""
    for name, config in {"config.json": AutoConfig, "generation_config.json": GenerationConfig}.items():
        try:
            if os.path.isfile(folder / name) and (config is GenerationConfig or model_type in FAMILIES):
                config.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # of any class, depending on what is wrong
            reason = " ".join(str(error).split())[:200]
            raise UserError(field, str(folder), f"transformers cannot read its {name} ({reason})", "correct the file") from error
    return {"config": AutoConfig.for_model(ALIASES[model_type])} if model_type in ALIASES else {}


def _add_bos(tokenizer: PreTrainedTokenizerBase, settings: Path, field: str) -> None:
    """Let the tokenizer add its BOS token if `add_bos_token` says so. Transformers 5 ignores this setting beside a tokenizer.json, although
    base models such as DeepSeek rely on it."""
    found = read_object(settings, field) if os.path.isfile(settings) else {}
    if found.get("add_bos_token") is True and tokenizer.bos_token_id is not None and tokenizer.bos_token_id not in tokenizer.encode(""):
        tokenizer.add_bos_token = True


def check_copy(source: Path, copy: Path, field: str = "model.path") -> None:
    """Raise UserError, naming `field`, if an engine could not read the configs in the copy of a checkpoint folder, or if the copy has
    another tokenizer than the source, or none."""
    _check_configs(copy, field)
    found = _describe(copy, _stamp(copy))
    for what, wanted in _describe(source, _stamp(source)).items():
        if found.get(what) != wanted:
            rule = f"a copy of its files in {copy} has another tokenizer: {what} differs"
            raise UserError(field, str(source), rule, "replace linked subfolders and files larger than 128 MiB by what transformers saves")


def _stamp(folder: Path) -> tuple[tuple[str, int], ...]:
    """Return names and times of change of the files that a tokenizer may be read from."""
    files = (folder / "config.json", *list_kept_files(folder))
    return tuple((str(file), file.stat().st_mtime_ns) for file in files if os.path.isfile(file))


@lru_cache(maxsize=4)
def _describe(folder: Path, _: tuple[tuple[str, int], ...]) -> dict[str, Any]:
    """Return what decides how a folder's tokenizer reads and writes text. Empty if transformers cannot load it without the folder's own
    code. The result is kept for the checkpoints of a run."""
    try:
        tokenizer = load_tokenizer(folder)
    except UserError:
        return {}
    added = tokenizer.get_added_vocab()
    text = _PROBE + "".join(added)
    whole = json.loads(tokenizer.backend_tokenizer.to_str()) if isinstance(tokenizer, PreTrainedTokenizerFast) else {}
    model = {name: value for name, value in (whole.get("model") or {}).items() if name != "vocab"}
    parts = {f"the {name.replace('_', '-')}": whole.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder")}
    return {
        "the vocabulary": tokenizer.get_vocab(),
        "the set of added tokens": added,
        "the set of special tokens": (tokenizer.special_tokens_map, tokenizer.all_special_ids),
        "the encoding of a text": [tokenizer.encode(text, add_special_tokens=special) for special in (False, True)],
        "the chat template": tokenizer.chat_template,
        "the merges": hashlib.sha256(json.dumps(model, sort_keys=True).encode()).digest(),  # and how they are applied
        **parts,
    }
