"""A pool of engines: distribution of requests, lost engines, restarts, and when a successor may serve."""

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from support.processes import until

from megatron_rl.config import Config
from megatron_rl.distributed import to_run_error
from megatron_rl.errors import EngineLostError, RunError
from megatron_rl.rollout.engine import ServedReport, derive_engine_seed
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.types import Generation, RemoteColumns, SamplingParams
from parallel.shards import Rect
from parallel.transport.base import Link

GREEDY = SamplingParams(0.0, 8)


class Scripted:
    """Answers a prompt with its first token + 1, and its own number as the policy version."""

    def __init__(self, number: int) -> None:
        self.number, self.asked, self.calls = number, [], []
        self.stopped, self.dead, self.hold = "", False, threading.Event()
        self.hold.set()
        self.graphs = ["graph"]

    def wait_until_ready(self):
        if self.dead:
            raise RunError("the engine did not start")

    def generate(self, prompts_B, samplings, abort=None):
        self.asked.append(len(prompts_B))
        self.hold.wait(60)
        if self.dead:
            raise EngineLostError(f"engine {self.number} is gone", "its last words")
        return [Generation(np.array([prompt[0] + 1]), np.zeros(1), "stop", self.number) for prompt in prompts_B]

    def owns(self, columns):
        return columns.url == str(self.number)

    def score(self, columns_B, problems_B):
        if self.dead:
            raise EngineLostError(f"engine {self.number} is gone", "its last words")
        return [f"engine {self.number}: {columns.handle} of {problem}" for columns, problem in zip(columns_B, problems_B, strict=True)]

    def read_graph(self):
        return self.graphs

    def finish_receiving(self, hashing):
        return {0: [f"engine {self.number} rank 0"], 1: [f"engine {self.number} rank 1"]}

    def read_activation_formats(self):
        return {"layer": "pow2"}

    def read_vocabulary(self):
        return [f"engine {self.number} rank {rank}" for rank in range(2)]

    def account_for_tensors(self):
        return [ServedReport(wrong=f"engine {self.number} rank {rank}") for rank in range(2)]

    def answer_canary(self, prompts_B, sampling):
        return [[f"engine {self.number} prompt {prompt}" for prompt in prompts_B]]

    def stop(self, force=False):
        self.stopped = "at once" if force else "politely"

    def __getattr__(self, name):
        def call(*args):
            if self.dead:
                raise EngineLostError(f"engine {self.number} is gone", "its last words")
            self.calls.append((name, *args))
            return {rank: [name] * len(rects) for rank, rects in args[0].items()} if name == "digest_rects" else None

        return call


class Fleet:
    """A pool that records all engines ever started. Starts whose number is in `broken` fail."""

    def __init__(self, broken: tuple[int, ...] = (), **rollout: object) -> None:
        self.started: list[Scripted] = []
        self.messages: list[str] = []
        self.threads: set[int] = set()
        self._broken = broken
        config = Config.model_validate({"model": {"path": "x"}, "rollout": rollout}, strict=False)
        self.engines = EnginePool(config, self.start, self.messages.append)

    def start(self, number: int, version: int) -> Scripted:
        self.threads.add(threading.get_ident())
        self.started.append(Scripted(number))
        self.started[-1].dead = len(self.started) - 1 in self._broken
        return self.started[-1]

    def lose(self, number: int) -> EngineLostError:
        """Let an engine die. Return the pool's error at the next call of all engines."""
        self.started[number].dead = True
        with pytest.raises(EngineLostError) as error:
            self.engines.admit()
        return error.value


@pytest.fixture
def fleet():
    with contextlib.ExitStack() as stack:

        def make(**arguments) -> Fleet:
            fleet = Fleet(**arguments)
            stack.callback(fleet.engines.stop)
            return fleet

        yield make


def prompts(count: int) -> list[list[int]]:
    return [[number] for number in range(count)]


def test_answers_come_in_order_and_the_work_is_shared(fleet):
    three = fleet(engines=3)
    for engine in three.started:
        engine.hold.clear()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(three.engines.generate, prompts(50), [GREEDY] * 50)
        until(lambda: sum(sum(engine.asked) for engine in three.started) >= 50, 60, "all prompts")
        assert sorted(sum(engine.asked) for engine in three.started) == [16, 16, 18]  # pieces of a group, which is eight
        for engine in three.started:
            engine.hold.set()
        assert [answer.output_ids_T.tolist() for answer in answers.result(60)] == [[number + 1] for number in range(50)]
    single = fleet(engines=1, max_running_requests=4)  # one engine gets everything in one request
    assert len(single.engines.generate(prompts(50), GREEDY)) == 50
    assert single.started[0].asked == [50]
    assert single.engines.generate([], GREEDY) == []


def test_an_engine_is_asked_for_no_more_than_it_decodes_at_once_and_the_other_takes_over(fleet):
    two = fleet(engines=2, max_running_requests=10)
    slow, quick = two.started
    slow.hold.clear()
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(two.engines.generate, prompts(80), GREEDY)
        until(lambda: sum(quick.asked) >= 70, 60, "the quick engine")
        assert (sum(slow.asked), sum(quick.asked)) == (10, 70)
        slow.hold.set()
        assert len(answers.result(60)) == 80


def test_requests_of_a_lost_engine_are_sampled_by_the_others_and_without_one_left_generating_says_why(fleet):
    two = fleet(engines=2)
    lost = two.started[0]
    lost.dead = True
    answers = two.engines.generate(prompts(40), GREEDY)
    assert [answer.output_ids_T[0] for answer in answers] == list(range(1, 41)) and {answer.policy_version for answer in answers} == {1}
    assert any("engine 0 is lost: engine 0 is gone; another one starts" in line for line in two.messages) and len(two.messages) == 1
    with pytest.raises(EngineLostError, match="engine 0 is gone"):
        two.engines.pause("finish")
    assert two.engines.wait_for_successors(EngineLostError("")) == 1
    assert lost.stopped == "at once" and len(two.started) == 3 and len(two.threads) == 1
    two.engines.generate(prompts(40), GREEDY)
    assert two.started[2].asked == [], "it holds the weights that the run began with"
    two.engines.admit()
    two.engines.generate(prompts(40), GREEDY)
    assert sum(two.started[2].asked) > 0
    single = fleet()
    single.started[0].dead = True
    with pytest.raises(EngineLostError, match="engine 0 is gone") as error:
        single.engines.generate(prompts(3), GREEDY)
    assert error.value.log_tail == "its last words"
    assert single.engines.wait_for_successors(error.value) == 1


def test_completions_of_several_engines_are_scored_where_they_are_kept(fleet):
    two = fleet(engines=2)
    columns = [RemoteColumns(str(number % 2), "", str(number), 1, "", 0.0, (0,)) for number in range(5)]
    scored = two.engines.score(columns, [*"abcde"])
    assert scored == [f"engine {number % 2}: {number} of {problem}" for number, problem in enumerate("abcde")]
    two.started[1].dead = True
    with pytest.raises(EngineLostError, match="engine 1 is gone"):
        two.engines.score(columns, [*"abcde"])
    with pytest.raises(EngineLostError, match="the engine at 1 is lost with the completions that it kept"):
        two.engines.score(columns[1:], [*"bcde"])
    assert len(two.engines.score(columns[::2], [*"ace"])) == 3


def test_remaining_engines_release_their_memory_and_the_next_sync_reports_a_loss(fleet):
    three = fleet(engines=3)
    three.started[0].dead = True
    three.engines.generate(prompts(1), GREEDY)
    three.started[2].dead = True
    three.engines.release_memory()
    assert ("release_memory",) in three.started[1].calls and len(three.messages) == 2
    with pytest.raises(EngineLostError, match="is gone"):
        three.engines.begin_sync()
    assert three.engines.wait_for_successors(EngineLostError("")) == 2
    three.engines.begin_sync()


def test_restarts_are_counted_between_policy_versions(fleet):
    single = fleet(max_restarts=2)
    for _ in range(2):
        single.engines.wait_for_successors(single.lose(-1))
        single.engines.end_sync(0)
        single.engines.admit()
    single.engines.end_sync(1)
    for _ in range(2):
        single.engines.wait_for_successors(EngineLostError("a connection broke"))
    with pytest.raises(RunError, match=r"engine 0 is gone; no more restarts in this step \(rollout.max_restarts = 2\)") as last:
        single.engines.wait_for_successors(single.lose(-1))
    assert not isinstance(last.value, EngineLostError) and len(single.started) == 3
    never = fleet(max_restarts=0)
    with pytest.raises(RunError, match="^engine 0 is gone$"):
        never.engines.wait_for_successors(never.lose(0))


def test_a_successor_that_does_not_start_is_tried_again_and_one_of_another_precision_graph_refused(fleet):
    two = fleet(engines=2, broken=(2, 3))
    assert two.engines.wait_for_successors(two.lose(0)) == 1
    assert [engine.number for engine in two.started] == [0, 1, 0, 0, 0]
    assert [bool(engine.stopped) for engine in two.started] == [True, False, True, True, False]
    with pytest.raises(RunError, match="did not start"):  # at the beginning it takes the others with it
        Fleet(engines=2, broken=(1,))
    two.started[1].graphs = ["another"]
    two.engines.read_graph()
    two.engines.end_sync(1)  # restarts are counted anew
    with pytest.raises(RunError, match="engine 1 has a different precision graph"):
        two.engines.wait_for_successors(two.lose(1))


def test_ranks_are_numbered_through(fleet):
    two = fleet(engines=2, tp=2)
    assert two.engines.finish_receiving(True) == {rank: [f"engine {rank // 2} rank {rank % 2}"] for rank in range(4)}
    assert [report.wrong for report in two.engines.account_for_tensors()] == [f"engine {rank // 2} rank {rank % 2}" for rank in range(4)]
    assert two.engines.read_vocabulary() == [f"engine {rank // 2} rank {rank % 2}" for rank in range(4)]
    assert two.engines.answer_canary([7], None) == [["engine 0 prompt 7"], ["engine 1 prompt 7"]]
    place = ("weight", Rect(0, 0, 1, 1))
    assert two.engines.digest_rects({1: [place], 2: [place, place]}) == {1: ["digest_rects"], 2: ["digest_rects", "digest_rects"]}
    assert [engine.calls[-1] for engine in two.started] == [("digest_rects", {1: [place]}), ("digest_rects", {0: [place, place]})]
    chunks = {rank: f"chunks of {rank}" for rank in range(4)}
    two.engines.connect(Link("disk", {}, [0], [0, 1, 2, 3], 1, 1.0), chunks, False)
    for number, engine in enumerate(two.started):
        _, link, own_chunks, _ = engine.calls[-1]
        assert (link.first, own_chunks) == (2 * number, {rank: chunks[2 * number + rank] for rank in range(2)})
    assert two.engines.read_activation_formats() == {"engine 0: layer": "pow2", "engine 1: layer": "pow2"}


def test_torchs_errors_about_a_lost_rank_become_one_line():
    gloo = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31289\nmore"
    line = "another trainer rank is gone ([/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
    assert str(to_run_error(RuntimeError(gloo))).startswith(line) and "\n" not in str(to_run_error(RuntimeError(gloo)))
    assert to_run_error(torch.distributed.DistBackendError("NCCL error"))
    with pytest.raises(RuntimeError) as short:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert "rank 0 is out of memory (it needs 1152921504606846976 bytes more); lower" in str(to_run_error(short.value))
    gpu = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
    assert "(it needs 2.00 GiB more); lower" in str(to_run_error(torch.OutOfMemoryError(gpu)))
    assert to_run_error(RuntimeError("shape mismatch")) is None and to_run_error(EngineLostError("an engine")) is None


def test_every_start_of_an_engine_has_a_seed_of_its_own_which_a_resumed_run_does_not_repeat():
    seeds = [derive_engine_seed(*parts) for parts in itertools.product((0, 1), (0, 1), (0, 7), (0, 1))]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 31 for seed in seeds)
