"""Completions with several turns: the prompts of turns, where a completion ends, and failing environments."""

import math

import numpy as np
import pytest
import torch
from support.agents import PAIR, ChatTokenizer

from megatron_rl.batch.kept_tokens import make_kept_tokens
from megatron_rl.config.data import DataConfig
from megatron_rl.config.environment import EnvironmentConfig
from megatron_rl.errors import RunError
from megatron_rl.rollout.engine import cut_at_stop
from megatron_rl.rollout.environments.base import Message, StepResult, load_environment
from megatron_rl.rollout.environments.pool import EnvironmentPool
from megatron_rl.rollout.generation import MultiTurnSampler
from megatron_rl.rollout.groups import RolloutBatch
from megatron_rl.rollout.metrics import build_sample_rows, compute_equal_excess, compute_rollout_metrics
from megatron_rl.training.samples import to_training_samples
from megatron_rl.types import Completion, Episode, Generation, Problem, SamplingParams
from parallel.plug import InputError

VERSION = 5
PROBLEM = [Problem("0", "A", "")]


class ScriptedEngine:
    """Answers each turn with the next ids of the script, cut at the token limit."""

    def __init__(self, scripts: list[list[list[int]]]) -> None:
        self._scripts = [list(script) for script in scripts]
        self.asked: list[list[tuple[list[int], int]]] = []
        self.versions = [VERSION] * 9

    def generate(self, prompts_B, samplings, abort=None):
        self.asked.append([(prompt.tolist(), sampling.max_new_tokens) for prompt, sampling in zip(prompts_B, samplings, strict=True)])
        assert {sampling.stop for sampling in samplings} == {(">",)}
        turn, result = len(self.asked), []
        for prompt, sampling in zip(prompts_B, samplings, strict=True):
            script = self._scripts[prompt[0] - ord("A")].pop(0)
            ids = script[: sampling.max_new_tokens]
            routing = np.full((len(prompt) + len(ids) - 1, 1, 1), turn, np.uint8)  # every token goes to the turn's number
            finish, logprobs = "stop" if ids == script else "length", -np.array(ids, np.float32)
            kept = make_kept_tokens([[token, 0] for token in ids])
            cached = len(prompt) - 1
            result.append(Generation(np.array(ids), logprobs, finish, self.versions[turn], None, routing, kept, cached_tokens=cached))
        return result


class Scripted:
    """Replaces the pool with scripted replies per problem, and records its calls."""

    stop = (">",)

    def __init__(self, replies: list[list[StepResult | None]], **limits: int) -> None:
        self.config = EnvironmentConfig(name="tests:scripted", **limits)
        self._replies, self.calls = [list(script) for script in replies], []

    def step(self, turns, episodes):
        self.calls += [(episode.id, *turn, episode.turn, episode.state) for turn, episode in zip(turns, episodes, strict=True)]
        return [self._replies[int(episode.id)].pop(0) or StepResult() for episode in episodes]


def say(text: str, error: str = "", state: bytes = b"") -> StepResult:
    return StepResult(Message(text, error), state=state)


def converse(scripts: list[str | list], replies: list[list[StepResult | None]], budget: int = 9, **limits: int):
    engine = ScriptedEngine([[turn if isinstance(turn, list) else [ord(x) for x in turn] for turn in script] for script in scripts])
    scripted = Scripted(replies, **limits)
    problems = [Problem(str(number), "ABC"[number], "", source="here") for number in range(len(scripts))]
    sampler = MultiTurnSampler(engine, ChatTokenizer(), scripted, DataConfig(chat=True))  # type: ignore[arg-type]
    result = sampler.sample(problems, [SamplingParams(1.0, budget)] * len(problems), VERSION)
    return result, engine, scripted


def test_a_turn_goes_on_from_the_very_tokens_that_were_sampled():
    """ "aa" sampled as two tokens stays two. The environment's "bb" is one token. "b>" after it is not merged with it."""
    (completion,), engine, scripted = converse([["aa>", "b>", "c"]], [[say("bb", state=b"1"), say("d"), None]])
    a, b, stop = ord("a"), ord("b"), ord(">")
    assert engine.asked == [[([65], 9)], [([65, a, a, stop, b + PAIR], 6)], [([65, a, a, stop, b + PAIR, b, stop, ord("d")], 4)]]
    assert completion.prompt_ids_T.tolist() == [65]
    assert completion.output_ids_T.tolist() == [a, a, stop, b + PAIR, b, stop, ord("d"), ord("c")]
    assert completion.response_mask_T.tolist() == [True] * 3 + [False] + [True] * 2 + [False] + [True]
    assert completion.logprobs_T.tolist() == [-a, -a, -stop, 0, -b, -stop, 0, -ord("c")]
    assert completion.routed_experts_T.flatten().tolist() == [1, 1, 1, 2, 2, 2, 3, 3]  # of the turn that sampled or first read a token
    assert completion.kept_tokens.counts.tolist() == [2] * 6, "of the policy's tokens alone"
    assert completion.kept_tokens.ids.reshape(6, 2)[:, 0].tolist() == [a, a, stop, b, stop, ord("c")]
    assert completion.dialogue == ["aa>", "bb", "b>", "d", "c"] and completion.text == "aa>bbb>dc"
    assert (completion.num_turns, completion.sampled_count, completion.finish_reason) == (3, 6, "stop")
    assert scripted.calls == [("0", "aa>", ">", 0, b""), ("0", "b>", ">", 1, b"1"), ("0", "c", "", 2, b"")]


def test_a_turn_ends_at_the_stop_text_for_the_environment_and_keeps_its_tokens():
    """One token may hold the stop text and more, such as `>` and a line break."""
    script = [ord("a"), ord(">") + PAIR]
    (completion,), _, scripted = converse([[script, "c"]], [[say("2"), None]])
    assert scripted.calls[0][1:3] == ("a>", ">") and completion.output_ids_T.tolist()[:2] == script and completion.text == "a>>2c"
    cases = {
        ("so 3#5", ("#",)): ("so 3#", "#"), ("a</b>\n", (">", "</b>")): ("a</b>", "</b>"), ("x", ("#",)): ("x", ""), ("", ()): ("", ""),
        ("a;b>c", (">", ";b")): ("a;b", ";b"), ("##", ("#", "##")): ("#", "#"),
    }  # fmt: skip
    for (text, stops), expected in cases.items():
        assert cut_at_stop(text, stops) == expected


def test_only_answers_that_go_on_are_sampled_again():
    result, engine, _ = converse([["x>", "y"], ["z"], ["v>", "w"]], [[say("1"), None], [None], [say("2"), None]])
    assert [completion.text for completion in result] == ["x>1y", "z", "v>2w"]
    assert sorted(prompt[0] for ((prompt, _),) in engine.asked) == [65, 65, 66, 67, 67], "each by itself: none waits for another one's turn"
    engine = ScriptedEngine([[[1], [2]]])
    engine.versions[2] = VERSION + 1  # checked for every turn
    sampler = MultiTurnSampler(engine, ChatTokenizer(), Scripted([[say("1"), None]]), DataConfig(chat=True))  # type: ignore[arg-type]
    with pytest.raises(RunError, match="sampled by policy version 6, the trainer holds version 5"):
        sampler.sample(PROBLEM, [SamplingParams(1.0, 9)], VERSION)


@pytest.mark.parametrize("turns, replies, limits, text, finish", [
    (["abcdefghijkl"], [], {}, "abcdefghi", "length"),  # cut by the engine: the environment is not asked
    (["abcd>", "efghij"], [say("+")], {}, "abcd>+efgh", "length"),  # 5 + 4 sampled: the budget is that of all turns
    (["abcdefgh>"], [say("+")], {}, "abcdefgh>", "length"),  # no token is left, so the message is left out
    (["abcdefgh>"], [None], {}, "abcdefgh>", "stop"),  # the last token just fits
    (["a>", "b>"], [say("123"), say("45")], {"max_tokens": 4}, "a>123b>", "length"),
    (["a>", "b>", "c"], [say("12"), say("34"), None], {"max_tokens": 4}, "a>12b>34c", "stop"),
    (["a>", "b>"], [say("1"), say("2")], {"max_turns": 2}, "a>1b>", "turns"),
    (["a>", "b"], [say("1"), None], {"max_turns": 2}, "a>1b", "stop"),
    (["a>", "b>"], [say("1"), StepResult(error="timeout after 5 s")], {}, "a>1b>", "environment"),
])  # fmt: skip
def test_an_answer_ends_at_the_limits_or_when_the_environment_ends_it(turns, replies, limits, text, finish):
    (completion,), _, _ = converse([turns], [replies], **limits)
    assert (completion.text, completion.finish_reason) == (text, finish)
    assert len(completion.output_ids_T) == len(completion.logprobs_T) == len(completion.response_mask_T)
    assert completion.environment_error == ("timeout after 5 s" if finish == "environment" else "")


def test_without_an_environment_an_answer_is_one_turn():
    class Engine:
        def generate(self, prompts_B, samplings, abort=None):
            assert {sampling.stop for sampling in samplings} == {()}
            return [Generation(np.array([97, 62], np.int32), np.array([-1.0, -2.0], np.float32), "stop", VERSION) for _ in prompts_B]

    (completion,) = MultiTurnSampler(Engine(), ChatTokenizer(), data=DataConfig(chat=True)).sample(
        PROBLEM, [SamplingParams(1.0, 9)], VERSION
    )  # type: ignore[arg-type]
    columns = completion.prompt_ids_T, completion.output_ids_T, completion.logprobs_T
    assert [(column.tolist(), column.dtype) for column in columns] == [([65], "int32"), ([97, 62], "int32"), ([-1.0, -2.0], "float32")]
    others = completion.problem, completion.finish_reason, completion.policy_version, completion.text
    assert others == (*PROBLEM, "stop", VERSION, "a>") and completion.response_mask_T is completion.version_lags_T is None
    assert completion.sampled_count == 2 and "dialogue" not in build_sample_rows(1, [completion], 1)[0]


def test_metrics_count_sampled_tokens_and_rows_show_the_author_of_each_turn():
    result, _, _ = converse([["ab>", "c"], ["d>"]], [[say("?", "no number"), None], [StepResult(error="ValueError: no")]])
    metrics = compute_rollout_metrics(RolloutBatch(result, {"ahead/generate": 2.0}))
    expected = {
        "length/mean": 3, "length/max": 4, "tokens/generated": 6, "tokens/per_second": 3, "environment/turns": 1.5,
        "tokens/cached_share": 4 / (1 + 5 + 1), "environment/token_share": 1 / 7, "environment/tool_errors": 1, "environment/errors": 1,
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected
    assert [row["dialogue"] for row in build_sample_rows(1, result, 2)] == [["ab>", "?", "c"], ["d>"]]


def test_engines_that_draw_the_same_numbers_are_noticed_and_answers_that_are_likely_to_be_equal_are_not():
    def groups(prob: float, draw, count: int = 16, size: int = 8) -> list[Completion]:
        """Groups of one-token answers, each of which has this probability."""
        problems = [Problem(f"p{number}", "", "") for number in range(count)]
        logprobs = np.array([math.log(prob)], np.float32)
        prompt = np.array([1], np.int32)
        return [
            Completion(problem, prompt, np.array([draw(number, member)], np.int32), logprobs, "stop", 1, "")
            for number, problem in enumerate(problems)
            for member in range(size)
        ]

    source = np.random.default_rng(0)
    assert (
        abs(compute_equal_excess(groups(1 / 5, lambda *_: source.integers(5)))) < 4 and compute_equal_excess(groups(1.0, lambda *_: 3)) == 0
    )
    assert compute_equal_excess(groups(1e-6, lambda number, member: number * 9 + member % 4)) > 10, "four numbers, twice"
    assert compute_equal_excess(groups(1e-6, lambda number, member: number * 9 + member)) == pytest.approx(0, abs=0.01)


def test_the_trainer_never_reads_a_log_prob_of_the_environment():
    result, _, _ = converse([["ab>", "c"]], [[say("12"), None]])
    result[0].logprobs_T[3:5] = float("nan")
    (sequence,) = to_training_samples(RolloutBatch(result))
    assert sequence.rollout_logprobs.tolist() == [-97.0, -98.0, -62.0, -99.0]
    assert sequence.response_ids.tolist() == result[0].output_ids_T.tolist() and sequence.sampled_count == 4
    assert torch.tensor([0, *sequence.response_ids])[sequence.target_positions + 1].tolist() == [97, 98, 62, 99]


def test_a_broken_environment_costs_its_own_answer_only(caplog):
    texts = ["one", "hang", "two", "hang in C", "die", "raise", "wrong type", "unpicklable", "no text"]
    texts += ["half a character", "end", "three"]
    episodes = [Episode(str(number), "", "") for number in range(len(texts))]
    with EnvironmentPool(EnvironmentConfig(name="support.hostile:Environment", workers=1, timeout=0.5)) as pool:
        assert pool.stop == (">",)
        replies = pool.step([(text, "") for text in [*texts, "four"]], [*episodes, Episode("none", "", "no object")])
        errors = [reply.error.partition(":")[0] for reply in replies]
        late, died = "timeout after 0.5 s", "worker died (exit code 7)"
        assert errors == ["", late, "", late, died, "KeyError", *["TypeError"] * 3, "UnicodeEncodeError", "", "", "ValueError"]
        assert [reply.message and reply.message.text for reply in replies if not reply.error] == ["one", "two", None, "three"]
        again = [Episode("0", "", "", state=replies[0].state), Episode("2", "", "", state=replies[2].state)]
        heard = pool.step([("a", ""), ("b", "")], again)
        assert [reply.message.text for reply in heard] == ["one+a", "two+b"], "it went on in another process"
    assert "failed in 9 of 13 completions: timeout after 0.5 s" in caplog.text


def test_an_episode_draws_from_its_seed_in_every_process():
    with EnvironmentPool(EnvironmentConfig(name="support.hostile:Drawing", workers=2)) as pool:
        episodes = [Episode("p", "?", "", seed=seed, turn=turn) for seed, turn in [(3, 0), (3, 0), (3, 1), (4, 0)]]
        first, again, later, other = (reply.message.text for reply in pool.step([("", ">")] * 4, episodes))
    assert first == again and len({first, later, other}) == 3 and first.endswith("seed 3, stop >")


def test_a_bad_name_is_refused_before_anything_starts():
    wrong = {
        "calculater": "must be your own as module:attribute",
        "no_such_module:Tool": "cannot be imported [(]ModuleNotFoundError",
        "support.hostile:Missing": "cannot be imported [(]AttributeError",
        "json:loads": "its step must be a plain function of [(]self, text[)]",
        "support.hostile:Speechless": "its step must be a plain function of [(]self, text[)]",
        "support.hostile:Deaf": "its step must be a plain function of [(]self, text[)]: too many positional arguments",
        "support.hostile:Unstoppable": "must be a tuple of texts",
    }
    for name, rule in wrong.items():
        with pytest.raises(InputError, match=rule):
            load_environment(name)
