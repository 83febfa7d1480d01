"""Loads the tokenizer of a checkpoint folder with transformers."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_rl.errors import UserError

_FIX = "add tokenizer.json and tokenizer_config.json of the original model"


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
    if not set(tokenizer.encode("1 + 1 = 2", add_special_tokens=False)) - {tokenizer.unk_token_id}:
        # transformers makes an empty tokenizer from config.json alone
        raise UserError(field, str(folder), "holds no usable tokenizer (it has no tokens for a text)", _FIX)
    if tokenizer.eos_token_id is None:
        raise UserError(field, str(folder), "its tokenizer has no end token", "set eos_token in tokenizer_config.json")
    return tokenizer
