"""Loads the tokenizer of a checkpoint folder with transformers."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.errors import UserError

_FIX = "add tokenizer.json and tokenizer_config.json of the original model"
_PROBE = "1 + 1 = 2"


def load_tokenizer(folder: Path, field: str = "model.path") -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder from local files only. Raises UserError, naming `field`, if the folder is missing, holds no
    usable tokenizer, or its tokenizer has no end token."""
    if not folder.is_dir():
        raise UserError(field, str(folder), "must be the folder of a Hugging Face checkpoint", "give an existing folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError or a bare Exception, depending on what is wrong
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(field, str(folder), f"holds no usable tokenizer ({reason[:200]})", _FIX) from error
    ids = tokenizer.encode(_PROBE, add_special_tokens=False)
    if not set(ids) - {tokenizer.unk_token_id}:
        # transformers makes an empty tokenizer from config.json alone
        raise UserError(field, str(folder), "holds no usable tokenizer (it has no tokens for a text)", _FIX)
    if tokenizer.eos_token_id is None:
        raise UserError(field, str(folder), "its tokenizer has no end token", "set eos_token in tokenizer_config.json")
    file = folder / "tokenizer.json"
    # for some classes, transformers takes only the vocabulary from tokenizer.json: a byte-level one then loses all blanks
    loses = tokenizer.decode(ids).strip() != _PROBE and file.is_file()
    if loses and Tokenizer.from_file(str(file)).encode(_PROBE, add_special_tokens=False).ids != ids:
        rule = f"transformers reads its tokenizer.json as {type(tokenizer).__name__}, which encodes other tokens than the file says"
        raise UserError(field, str(folder), rule, 'set "tokenizer_class" to "PreTrainedTokenizerFast" in tokenizer_config.json')
    _add_bos(tokenizer, folder / "tokenizer_config.json")
    return tokenizer


def _add_bos(tokenizer: PreTrainedTokenizerBase, settings: Path) -> None:
    """Let the tokenizer add its BOS token if `add_bos_token` says so. Transformers 5 ignores this setting beside a tokenizer.json, although
    base models such as DeepSeek rely on it."""
    wanted = settings.is_file() and json.loads(settings.read_text()).get("add_bos_token") is True
    if wanted and tokenizer.bos_token_id is not None and tokenizer.bos_token_id not in tokenizer.encode(""):
        tokenizer.add_bos_token = True
