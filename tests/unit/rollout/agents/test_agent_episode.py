"""The tree of turns of an episode: which tokens a request continues, where it branches, what is trained on, and where it ends."""

import json

import numpy as np
import pytest
from support.agents import END, PAIR, PROBLEM, ChatTokenizer, Policy, config

from megatron_rl.config.data import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards.thinking import Response
from megatron_rl.rollout.agents.chat_format import ChatFormat
from megatron_rl.rollout.agents.chat_forms import ChatForm
from megatron_rl.rollout.agents.episode import AgentEpisode
from megatron_rl.rollout.agents.forms import read_request
from megatron_rl.rollout.agents.messages import ConversationMessage, PolicyRequest, RefusedError
from megatron_rl.rollout.groups import RolloutBatch, assign_rewards
from megatron_rl.rollout.metrics import compute_rollout_metrics
from megatron_rl.training.samples import list_owners, to_training_samples
from megatron_rl.types import Reward, SamplingParams

A = ord("a")


class Conversation:
    """An episode with a policy that doubles the user's last letter."""

    def __init__(self, staleness: int = 0, budget: int = 99, **settings: int) -> None:
        self.policy = Policy(lambda prompt: prompt[-5] * 2)
        sampling = SamplingParams(1.0, budget, seed=11)
        self.episode = AgentEpisode(PROBLEM, sampling, 5, staleness, config(**settings), ChatFormat(ChatTokenizer(), DataConfig()))

    def ask(self, *contents: str, roles: str = "", **options: object) -> str:
        """Send messages of user and policy in turn, or of the roles `s`, `u`, `a` and `t`."""
        names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
        letters = roles or "ua" * len(contents)
        messages = [{"role": names[role], "content": content} for role, content in zip(letters, contents, strict=False)]
        return self.send(read_request(ChatForm, json.dumps({"messages": messages, **options}).encode(), self.episode.find_turn))

    def send(self, request: PolicyRequest) -> str:
        turn = self.episode.plan(request)
        (generation,) = self.policy.generate([turn.prompt_ids_T], [turn.sampling])
        text = ChatTokenizer().decode(generation.output_ids_T.tolist(), skip_special_tokens=True)
        self.episode.add(turn, generation, ConversationMessage("assistant", text))
        self.episode.receive(turn)
        return turn.messages[-1].content


def text(ids: np.ndarray) -> str:
    return ChatTokenizer().decode(ids.tolist(), skip_special_tokens=False)


def test_a_request_that_extends_an_answer_goes_on_from_the_very_tokens_that_were_sampled():
    """ "aa" sampled as two tokens stays two, and a sampled end token is not written again."""
    chat = Conversation()
    assert chat.ask("a") == "aa" and chat.ask("a", "aa", "b") == "bb"
    first, second = (prompt for prompt, _ in chat.policy.asked)
    assert second[: len(first) + 3] == [*first, A, A, ord(END)] and PAIR + A not in second
    assert text(np.array(second)) == "<u>a~<a>aa~<u>b~<a>"
    completion = chat.episode.finish("", None)
    assert text(completion.prompt_ids_T) == "<u>a~<a>" and text(completion.output_ids_T) == "aa~<u>b~<a>bb~"
    assert completion.response_mask_T.tolist() == [True] * 3 + [False] * 8 + [True] * 3
    assert completion.logprobs_T[completion.response_mask_T].tolist() == [-A, -A, -126, -98, -98, -126]
    assert (completion.text, completion.dialogue, completion.calls) == ("bb", ["aa", "<u>b<a>", "bb"], 2)
    assert completion.routed_experts_T.flatten().tolist() == [1] * 10 + [2] * 11, "of the turn that sampled or first read a token"
    assert completion.kept_tokens.counts.tolist() == [2] * 6 and completion.version_lags_T is None
    assert (completion.prompt_tokens, completion.cached_tokens, completion.finish_reason) == (8 + 19, 2, "stop")
    assert {sampling.seed for _, sampling in chat.policy.asked} == {11}, "one conversation has one seed, the episode's"


def test_a_thought_that_the_template_opens_is_marked_in_the_text(monkeypatch):
    monkeypatch.setattr("megatron_rl.rollout.agents.chat_format.find_markers", lambda template: ("<a>", "</a>"))
    chat = Conversation()
    chat.ask("a")
    assert chat.episode.finish("", None).text == "<a>aa"


def test_an_answer_without_its_end_gets_its_mark_and_every_token_has_its_version():
    chat = Conversation()
    assert chat.ask("a", max_tokens=1) == "a"
    chat.ask("a", "a", "b")
    assert text(np.array(chat.policy.asked[1][0])) == "<u>a~<a>a~<u>b~<a>"
    completion = chat.episode.finish("", None)
    assert completion.response_mask_T.tolist() == [True] + [False] * 9 + [True] * 3, "the mark was not sampled"
    chat = Conversation(staleness=2)
    chat.policy.version = 3
    chat.ask("a")
    chat.policy.version = 4
    chat.ask("a", "aa", "b")
    completion = chat.episode.finish("", None)
    assert completion.version_lags_T[completion.response_mask_T].tolist() == [2, 2, 2, 1, 1, 1] and completion.policy_version == 4
    with pytest.raises(RefusedError, match="has ended"):  # whoever still asks
        chat.ask("a")


def test_a_request_that_differs_from_the_history_begins_another_branch():
    chat = Conversation()
    chat.ask("a")
    chat.ask("a", "aa", "b")
    chat.ask("a", "aa", "c")  # an edited message: another answer to the same history
    chat.ask("a", "a a", "c")  # an edited answer: all anew
    chat.ask("sub", "a", roles="su")  # a sub-agent
    chat.ask("a", "aa", "b", "bb", "d")  # and back
    chat.ask("a")  # again: other draws
    completion = chat.episode.finish("", None)
    conversations = [text(np.concatenate([each.prompt_ids_T, each.output_ids_T])) for each in completion.conversations]
    assert conversations == [
        "<u>a~<a>aa~",
        "<u>a~<a>aa~<u>c~<a>cc~",
        "<u>a~<a>a a~<u>c~<a>cc~",
        "<s>sub~<u>a~<a>aa~",
        "<u>a~<a>aa~<u>b~<a>bb~<u>d~<a>dd~",
    ]
    assert len({sampling.seed for _, sampling in chat.policy.asked}) == 5, "every conversation has a seed"
    assert completion.calls == 7 and completion.total_sampled == 7 * 3, "no sampled token is trained twice, and none is left out"
    assert completion.longest_sampled == 9, "the turn that the longest conversation shares counts in it"
    shared = completion.branches[3]
    assert shared.sampled_count == 6 and not shared.response_mask_T[:3].any(), "its first turn is trained in another sample"
    assert len(shared.kept_tokens.counts) == 6 and len(shared.routed_experts_T) == len(shared.prompt_ids_T) + len(shared.output_ids_T) - 1


def test_the_longest_history_that_fits_is_gone_on_from_if_the_tools_are_the_same():
    chat, tools = Conversation(), [{"type": "function", "function": {"name": "python"}}]
    chat.ask("a", tools=tools)
    chat.ask("a", "aa", "b", tools=tools)
    chat.ask("a", "aa", "b", "bb", "c", tools=tools)
    chat.ask("a", "aa", "b")
    prompts = [text(np.array(prompt)) for prompt, _ in chat.policy.asked]
    assert prompts[2] == "[python]<u>a~<a>aa~<u>b~<a>bb~<u>c~<a>" and prompts[3] == "<u>a~<a>aa~<u>b~<a>"
    assert len(chat.episode.finish("", None).conversations) == 2


@pytest.mark.parametrize("settings, requests, refused, finish", [
    ({"max_calls": 2}, [("a",), ("b",), ("c",)], "agent.max_calls = 2 responses were given", "turns"),
    ({"max_tokens": 16}, [("a",), ("a", "aa", "b")], "the conversation of 19 tokens, 3 sampled, leaves no room", "length"),
    ({"budget": 3}, [("a",), ("a", "aa", "b")], "leaves no room (agent.max_tokens = 4096, rollout.max_new_tokens = 3)", "length"),
    ({"budget": 5}, [("a",), ("a", "aa", "b")], "", "length"),  # cut by the engine
    ({"max_tokens": 10}, [("a",)], "", "length"),
])  # fmt: skip
def test_limits_refuse_an_agent_which_is_then_cut_and_not_broken(settings, requests, refused, finish):
    chat = Conversation(**settings)
    for contents in requests[:-1] if refused else requests:
        chat.ask(*contents)
    if refused:
        with pytest.raises(RefusedError) as error:
            chat.ask(*requests[-1])
        assert refused in str(error.value)
    completion = chat.episode.finish("exit code 1: openai.BadRequestError" if refused else "", None)
    assert (completion.finish_reason, completion.environment_error) == (finish, "")
    assert all(each.sampled_count <= settings.get("budget", 99) for each in completion.conversations)


def test_conversations_of_an_episode_share_its_reward_and_an_agent_that_asked_nothing_has_no_sample():
    chat, mute = Conversation(), Conversation()
    chat.ask("a")
    chat.ask("b")
    completions = [chat.episode.finish("", None), mute.episode.finish("timeout after 3 s", None)]

    class Rewards:
        def split(self, text, problem):
            return Response(text, "")

        def score(self, texts, problems, lengths, broken, *_):
            assert (texts, lengths, broken) == (["bb", ""], [6, 0], ["", "agent: timeout after 3 s"])
            return [Reward(0.25, False), Reward(0.0, False, error=broken[1])]

    assign_rewards(completions, Rewards())
    rollout = RolloutBatch(completions, {"ahead/generate": 2.0})
    samples = to_training_samples(rollout)
    assert [(sample.reward, sample.number) for sample in samples] == [(0.25, 0), (0.25, 1)] and list_owners(rollout) == [0, 0]
    metrics = compute_rollout_metrics(rollout)
    expected = {"agent/calls": 1, "agent/conversations": 1, "agent/errors": 1, "agent/stopped": 0, "tokens/generated": 6, "length/max": 6}
    assert {name: metrics[name] for name in expected} == expected and "environment/turns" not in metrics


def test_an_agent_that_was_cut_before_it_gave_a_reward_has_none_and_no_function_judges_it():
    chat = Conversation(max_calls=1, own_reward=True)
    chat.ask("a")
    with pytest.raises(RefusedError):
        chat.ask("b")
    cut = chat.episode.finish("exit code 1: openai.BadRequestError", None)
    assert (cut.own_reward, cut.environment_error, cut.finish_reason) == (0.0, "", "turns")
    assert Conversation().episode.finish("", None).own_reward is None


def test_a_chat_template_that_loses_messages_is_refused():
    class Forgetful(ChatTokenizer):
        def apply_chat_template(self, chat, **options):
            return super().apply_chat_template([message for message in chat if message["role"] != "tool"], **options)

    class Strict(ChatTokenizer):
        def apply_chat_template(self, chat, **options):
            raise ValueError("only users may speak")

    class Plain(ChatTokenizer):
        chat_template = None

    ChatFormat(ChatTokenizer(), DataConfig()).check(tools=True)
    forgetful = ChatFormat(Forgetful(), DataConfig())
    forgetful.check(tools=False)
    result = [ConversationMessage("user", "q"), ConversationMessage("tool", "r")]
    for encode in (lambda: forgetful.encode_start(result, "[]"), lambda: forgetful.encode_rest(result[1:], "[]", np.array([97], np.int32))):
        with pytest.raises(RefusedError, match="leaves out results of tools"):
            encode()
    for tokenizer, rule in ((Forgetful(), "leaves out messages"), (Strict(), "only users may speak"), (Plain(), "letters has none")):
        with pytest.raises(UserError, match=rule):
            ChatFormat(tokenizer, DataConfig()).check(tools=True)
