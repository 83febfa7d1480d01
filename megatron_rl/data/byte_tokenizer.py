"""The tokenizer: a byte-level one made by the project, and loading the one of a checkpoint folder.

The byte-level tokenizer has one entry per byte and three special tokens, 259 in all. It encodes any text, learns nothing and needs no
download: right for a model made from scratch.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from megatron_rl.errors import UserError

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")


def make_byte_tokenizer(folder: Path) -> None:
    """Write the byte-level tokenizer's files into `folder` (made when absent).

    Ids 0..255 are bytes (in the order of the byte-level alphabet's characters), 256 is `<|endoftext|>` (end and padding),
    257 `<|im_start|>`, 258 `<|im_end|>`.
    """
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_level.decoder = decoders.ByteLevel()
    byte_level.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT, clean_up_tokenization_spaces=False
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in the checkpoint folder `folder`, from local files only.

    Raises UserError (field `model.path`) when the folder is missing, holds no usable tokenizer, or names no end token.
    """
    if not folder.is_dir():
        raise UserError("model.path", str(folder), "must be the folder of a Hugging Face checkpoint", "give an existing folder")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError or a bare Exception, depending on what is wrong
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError("model.path", str(folder), f"holds no usable tokenizer ({reason[:200]})", "add tokenizer.json") from error
    if tokenizer.eos_token_id is None:
        raise UserError("model.path", str(folder), "its tokenizer has no end token", "set eos_token in tokenizer_config.json")
    return tokenizer
