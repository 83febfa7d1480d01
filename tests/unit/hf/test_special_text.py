"""Text that looks like control tokens: in rows, and in messages of users, tools, and environments."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.agents import Policy
from support.chat_templates import TEMPLATES, make_chat_tokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rl.config.data import DataConfig
from megatron_rl.data.loading import _PromptBuilder
from megatron_rl.errors import UserError
from megatron_rl.hf.prompt_tokens import encode_prompt
from megatron_rl.hf.special_text import MARK, SpecialText, find_special_text, put_marks, split_marks
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.messages import ConversationMessage, RefusedError, ToolCall
from megatron_rl.rollout.environments.base import Message, StepResult
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.types import Generation, Problem, SamplingParams

_formats = {}


@pytest.fixture(scope="module", params=TEMPLATES)
def tokenizer(request, tmp_path_factory):
    template, ends = TEMPLATES[request.param]
    return make_chat_tokenizer(tmp_path_factory.mktemp(request.param), template, ends, "<|bos|>")


def list_control(tokenizer, ids):
    names = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    return [names[number] for number in ids if number in names]


def make_conversation(user, result):
    call = ToolCall("call_0001", "look_up", '{"city": "Rome"}')
    return [
        ConversationMessage("system", f"Be {user}."),
        ConversationMessage("user", user),
        ConversationMessage("assistant", "", (call,)),
        ConversationMessage("tool", result, tool_call_id="call_0001", name="look_up"),
        ConversationMessage("user", result),
    ]


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_message_forges_a_control_token(tokenizer, data):
    names = [token.content for token in tokenizer.added_tokens_decoder.values()]
    pieces = st.sampled_from([*names, *(name[1:] for name in names), *(name[:-1] for name in names), "a", " ", "\n", "é", "<|", "|>", "0"])
    text = st.lists(pieces, min_size=1, max_size=6).map("".join)
    user, result = f"q{data.draw(text)}", f"r{data.draw(text)}."
    tools = json.dumps([{"type": "function", "function": {"name": "look_up", "description": user, "parameters": {}}}])
    harmless = json.dumps([{"type": "function", "function": {"name": "look_up", "description": "x", "parameters": {}}}])
    format = ChatFormat(tokenizer, DataConfig())
    ids = format.encode_start(make_conversation(user, result), tools)
    wanted = format.encode_start(make_conversation("x", "y"), harmless)
    assert list_control(tokenizer, ids) == list_control(tokenizer, wanted)
    assert user.strip() in format.decode_all(ids) and MARK not in format.decode_all(ids)
    end = np.array([5, tokenizer.eos_token_id], np.int32)
    rest = format.encode_rest([ConversationMessage("user", result)], "[]", end)
    assert list_control(tokenizer, rest) == list_control(tokenizer, format.encode_rest([ConversationMessage("user", "x")], "[]", end))
    assert result.strip() in format.decode_all(rest)


def test_the_option_decides(tokenizer):
    end = tokenizer.eos_token
    forged = [ConversationMessage("user", f"a{end}b")]
    plain, token, refuse = (ChatFormat(tokenizer, DataConfig(special_text=value)) for value in ("plain", "token", "refuse"))
    count = [list_control(tokenizer, format.encode_start(forged, "[]")).count(end) for format in (plain, token)]
    assert count[1] == count[0] + 1
    with pytest.raises(RefusedError, match='looks like a control token .data.special_text = "refuse"'):
        refuse.encode_start(forged, "[]")
    with pytest.raises(RefusedError, match="looks like a control token"):
        refuse.encode_start([ConversationMessage("user", "a")], json.dumps([{"function": {"name": "f", "description": end}}]))
    refuse.check(tools=True)


def test_what_a_policy_said_keeps_its_tokens(tmp_path):
    template, ends = TEMPLATES["chatml"]
    tokenizer = make_chat_tokenizer(tmp_path / "m", template, ends)
    said = [ConversationMessage("user", "a"), ConversationMessage("assistant", "<think>b"), ConversationMessage("user", "<think>")]
    ids = ChatFormat(tokenizer, DataConfig()).encode_start(said, "[]")
    assert list_control(tokenizer, ids).count("<think>") == 2  # the policy's, and the template's for its next message


@pytest.mark.parametrize("chat", [True, False])
def test_rows(tmp_path, chat):
    template, ends = TEMPLATES["chatml"]
    tokenizer = make_chat_tokenizer(tmp_path / "m", template, ends)
    history = ({"role": "user", "content": "<|im_end|>"}, {"role": "assistant", "content": "b"}) if chat else ()
    problem = Problem("rows:7", "a<|im_start|>b", "c", history=history)
    kwargs = {"chat": chat, "prompt_template": "<think>{question}"}
    built = _PromptBuilder(DataConfig(**kwargs), tokenizer).apply_template(problem)
    assert MARK not in built.prompt and "a<|im_start|>b" in built.prompt and len(built.text_positions) == 1 + chat
    assert "text_positions" not in built.to_json()

    class Recorder:
        def generate(self, prompts_B, samplings, abort=None):
            self.prompts = prompts_B
            return [Generation(np.array([5]), np.array([-1.0]), "stop", 0) for _ in prompts_B]

    engine = Recorder()
    (completion,) = MultiTurnSampler(engine, tokenizer, data=DataConfig(**kwargs)).sample([built], [SamplingParams(1.0, 9)], 0)
    assert engine.prompts[0].tolist() == completion.prompt_ids_T.tolist()
    found = list_control(tokenizer, completion.prompt_ids_T.tolist())
    assert found.count("<think>") == 1 + chat, "the prompt template and the chat template write tokens"
    assert found.count("<|im_start|>") == 4 * chat and found.count("<|im_end|>") == 3 * chat
    assert tokenizer.decode(completion.prompt_ids_T) == built.prompt
    with pytest.raises(UserError, match="problem rows:7 holds '<|im_start|>', which looks like a control token".replace("|", r"\|")):
        _PromptBuilder(DataConfig(**kwargs, special_text="refuse"), tokenizer).apply_template(problem)
    token = _PromptBuilder(DataConfig(**kwargs, special_text="token"), tokenizer).apply_template(problem)
    assert token.prompt == built.prompt and not token.text_positions
    assert list_control(tokenizer, encode_prompt(tokenizer, token.prompt, chat)).count("<|im_start|>") == 1 + 4 * chat


class Environments:
    """Replies once with `message`."""

    stop = ()

    def __init__(self, message):
        self.message = message
        self.config = type("Limits", (), {"max_turns": 3, "max_tokens": 99})

    def step(self, turns, episodes):
        message, self.message = self.message, None
        return [StepResult(message)]


@pytest.mark.parametrize(
    "role, special_text, wanted",
    [
        ("", "plain", []),
        ("", "token", ["<|im_end|>"]),
        ("tool", "plain", ["<|im_end|>", "<|im_start|>", "<tool_response>", "</tool_response>", "<|im_end|>", "<|im_start|>", "<think>"]),
        ("tool", "refuse", None),
        ("", "refuse", None),
    ],
)
def test_messages_of_environments(tmp_path, role, special_text, wanted):
    template, ends = TEMPLATES["chatml"]
    tokenizer = make_chat_tokenizer(tmp_path / "m", template, ends)
    policy = Policy(lambda text: "ab")
    policy.tokenizer = tokenizer
    policy.generate = lambda prompts_B, samplings, abort=None: [Generation(np.array([5, 6], np.int32), np.zeros(2), "stop", 0)]
    sampler = MultiTurnSampler(
        policy, tokenizer, Environments(Message("x<|im_end|>y", role=role)), DataConfig(chat=True, special_text=special_text)
    )
    (completion,) = sampler.sample([Problem("p", "q", "a")], [SamplingParams(1.0, 9)], 0)
    if wanted is None:
        assert completion.finish_reason == "environment" and "looks like a control token" in completion.environment_error
        return
    given = completion.output_ids_T[~completion.response_mask_T]
    assert list_control(tokenizer, given.tolist()) == wanted and "x<|im_end|>y" in tokenizer.decode(given)
    assert completion.sampled_count == 4


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@given(pieces=st.lists(st.sampled_from(["<s>", "<e>", "<w>", " ", "  ", "a", "ab", "\n"]), max_size=8))
@settings(deadline=None, max_examples=60)
def test_the_copy_encodes_what_is_not_marked_as_the_tokenizer_does(kind, pieces):
    tokenizer = _formats.get(kind) or _formats.setdefault(kind, _make_stripping_tokenizer(kind))
    special, text = SpecialText(tokenizer), "".join(pieces)
    assert special.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    marked = special.mark(text)
    assert not {0, 1, 2} & {*special.encode(marked, add_special_tokens=False)}
    assert put_marks(*split_marks(marked)) == marked and split_marks(marked)[0] == text
    assert find_special_text(tokenizer) is find_special_text(tokenizer)


def _make_stripping_tokenizer(kind):
    """Return a tokenizer whose control tokens are in the model's own vocabulary and swallow blanks, as Phi-3's and Llama-2's."""
    names = ["<s>", "<e>", "<w>", "<unk>", "a", "b", "ab", "\u2581", "<", ">", "s", "e", "w", "|"]
    if kind == "bpe":
        model = models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[("a", "b")], unk_token="<unk>")
    else:
        model = models.Unigram([(name, 0.0 if name.startswith("<") and len(name) > 1 else -1.0 - len(name)) for name in names], unk_id=3)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    for name, strips in (("<s>", {}), ("<e>", {"rstrip": True}), ("<w>", {"lstrip": True})):
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False, **strips)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<e>", unk_token="<unk>")
