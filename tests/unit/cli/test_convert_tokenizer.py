"""A tokenizer that is published as code is refused by name, and converted to the rule that its code states."""

import base64
import json
import subprocess
import sys
from itertools import pairwise

import pytest
import regex
from tokenizers import ByteLevelBPETokenizer

from examples.arithmetic.byte_tokenizer import make_byte_tokenizer
from megatron_rl.cli.convert_tokenizer import convert
from megatron_rl.errors import UserError
from megatron_rl.hf.tokenizer import check_copy, load_tokenizer

LOWER, UPPER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]", r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
BEFORE, AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PARTS = [
    r"[\p{Han}]+", f"{BEFORE}[{UPPER}]*[{LOWER}]+{AFTER}", f"{BEFORE}[{UPPER}]+[{LOWER}]*{AFTER}", r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
]  # fmt: skip
"""The rule of Kimi's tokenization_kimi.py: Chinese apart from other letters, and words cut where capitals begin."""
TEXTS = [
    "Hello world, it's 12345 o'clock", "东京abc大学 XYZ中文", "CamelCaseWord HTTPServer IT'S", "  spaces\t\n\n  x", "１２３４５ ½ é̂",
    "日本語のテキスト한국어", "naïve café\r\nend ", "🙂🙂 <|im_end|>x[BOS]", "", "a<|tool|>b<|reserved_token_%d|>c",
]  # fmt: skip
SPECIAL = {0: "[BOS]", 1: "[EOS]", 3: "<|im_end|>", 5: "<|tool|>"}


def make_published(folder, parts=PARTS):
    """Write a folder as Moonlight publishes its tokenizer. Return the ranks of its tokens, with numbers of special tokens behind."""
    make_byte_tokenizer(folder)
    (folder / "tokenizer.json").unlink()
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [*TEXTS, "中文大学", "hello", "world", "123", "HTTP", "日本"] * 9, vocab_size=600, min_frequency=2, show_progress=False
    )
    to_byte = {char: byte for byte, char in zip(range(256), byte_characters(), strict=True)}
    words = sorted(trained.get_vocab().items(), key=lambda pair: pair[1])
    tokens = [bytes(map(to_byte.__getitem__, word)) for word, _ in words]
    (folder / "tiktoken.model").write_bytes(b"\n".join(base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)))
    pattern = "[" + ", ".join(f'r"""{part}"""' for part in parts) + "]"
    code = f"import tiktoken\nraise RuntimeError('run')\nclass TikTokenTokenizer:\n    pat_str = '|'.join({pattern})\n"
    (folder / "tokenization_kimi.py").write_text(code, encoding="utf-8")
    added = {len(tokens) + number: {"content": text, "special": number != 5} for number, text in SPECIAL.items()}
    settings = {"added_tokens_decoder": added, "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    settings |= {"bos_token": "[BOS]", "eos_token": "[EOS]", "tokenizer_class": "TikTokenTokenizer", "chat_template": "{{ 'è' }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return {token: rank for rank, token in enumerate(tokens)}


def byte_characters():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [bytes_to_unicode()[byte] for byte in range(256)]


def encode(text, ranks, parts=PARTS):
    """Return what tiktoken makes of a text: it cuts out special tokens, splits by the pattern, and merges the pair of the lowest rank."""
    special = {
        f"<|reserved_token_{len(ranks) + number}|>" if number not in SPECIAL else SPECIAL[number]: len(ranks) + number
        for number in range(6)
    }
    ids = []
    for part in regex.split("(" + "|".join(map(regex.escape, special)) + ")", text):
        if part in special:
            ids.append(special[part])
            continue
        for word in regex.findall("|".join(parts), part, flags=regex.V1):
            pieces = [bytes([byte]) for byte in word.encode()]
            if word.encode() in ranks:
                pieces = [word.encode()]
            while len(pieces) > 1:
                pairs = [ranks.get(a + b, 1 << 30) for a, b in pairwise(pieces)]
                if (rank := min(pairs)) == 1 << 30:
                    break
                at = pairs.index(rank)
                pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
            ids += [ranks[piece] for piece in pieces]
    return ids


def test_code_is_refused_and_its_rule_is_converted(tmp_path):
    ranks = make_published(tmp_path)
    with pytest.raises(UserError, match=r"published as code, without tokenizer.json.*run `python -m megatron_rl.cli.convert_tokenizer"):
        load_tokenizer(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli.convert_tokenizer", tmp_path], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        text = text.replace("%d", str(len(ranks) + 2))
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == encode(text, ranks) and tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.chat_template) == ("[EOS]", len(ranks) + 1, "{{ 'è' }}")
    assert tokenizer.decode([len(ranks) + 5, len(ranks) + 3], skip_special_tokens=True) == "<|tool|>"
    with pytest.raises(UserError, match="holds a tokenizer.json already"):
        convert(tmp_path)


def test_the_rule_of_transformers_would_give_other_tokens(tmp_path):
    """Why the code's own rule matters: the pattern that transformers takes for every tiktoken file does not cut Chinese from Latin."""
    ranks = make_published(tmp_path)
    general = [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]
    words = [regex.findall("|".join(parts), TEXTS[1], flags=regex.V1) for parts in (PARTS, general)]
    assert words[0] != words[1] and encode(TEXTS[0], ranks) == encode(TEXTS[0], ranks, general)


@pytest.mark.parametrize(("name", "content", "says"), [
    ("tokenization_kimi.py", "pat_str = make()", "is not a text"), ("tokenization_kimi.py", "x = 1", "assigns no pat_str"),
    ("tokenization_kimi.py", "x =", "cannot be read"), ("tiktoken.model", "a b c", "cannot be read"),
    ("tiktoken.model", "YQ== 5", "do not follow"), ("tokenization_kimi.py", None, "0 files"), ("tiktoken.model", None, "0 files"),
])  # fmt: skip
def test_what_is_not_understood_is_refused_and_changes_nothing(tmp_path, name, content, says):
    make_published(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content, encoding="utf-8")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=says):
        convert(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_other_tokenizers_as_code_are_refused_without_a_converter(tmp_path):
    make_published(tmp_path)
    (tmp_path / "tiktoken.model").rename(tmp_path / "tokenizer.model")
    with pytest.raises(UserError, match="use a copy of the model with tokenizer.json"):
        load_tokenizer(tmp_path)


CHANGES = {
    "the merges": lambda whole: whole["model"].update(merges=whole["model"]["merges"][:-1]),
    "the normalizer": lambda whole: whole.update(normalizer={"type": "Lowercase"}),
    "the pre-tokenizer": lambda whole: whole["pre_tokenizer"]["pretokenizers"][0].update(behavior="Removed"),
    "the decoder": lambda whole: whole.update(decoder={"type": "Fuse"}),
    "the post-processor": lambda whole: whole.update(post_processor=None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_copy_whose_tokenizer_works_otherwise_is_refused(tmp_path, what):
    source, copy = tmp_path / "source", tmp_path / "copy"
    for folder in (source, copy):
        folder.mkdir()
        make_published(folder)
        convert(folder)
    check_copy(source, copy)
    whole = json.loads((copy / "tokenizer.json").read_text(encoding="utf-8"))
    CHANGES[what](whole)
    (copy / "tokenizer.json").write_text(json.dumps(whole), encoding="utf-8")
    with pytest.raises(UserError, match="has another tokenizer"):
        check_copy(source, copy)
