"""Hooks on SGLang's scheduler and its start: shared prefill, stop strings, forked children, and dummy weights."""

import gc
import multiprocessing
import sys
from array import array
from types import SimpleNamespace

import pytest
import torch

from rollout_sglang.hooks.scheduling import MIN_SHARED, add_request, count_tail_tokens
from rollout_sglang.hooks.startup import fork_children, make_up_weights

LONG = list(range(MIN_SHARED + 1))


def request(ids: list[int], cached: int = 0, output: tuple[int, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(full_untruncated_fill_ids=array("q", ids), prefix_len=cached, output_ids=output)


@pytest.mark.parametrize("batch, running, candidate, waits", [
    ([LONG], [], request(LONG), True),
    ([], [request(LONG)], request(LONG), True),  # launched, and its result not come
    ([], [request(LONG, output=(1,))], request(LONG), False),  # it is in the cache, or was evicted
    ([LONG], [], request(LONG, cached=1), False),
    ([LONG[:-1]], [], request(LONG[:-1]), False),
    ([LONG], [], request([*LONG, 1]), False),
])  # fmt: skip
def test_a_request_waits_while_another_computes_its_prompt(monkeypatch, batch, running, candidate, waits):
    policy = SimpleNamespace(AddReqResult=SimpleNamespace(CONTINUE="waits"))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.schedule_policy", policy)
    for disabled in (False, True):
        cache = SimpleNamespace(disable=disabled)
        adder = SimpleNamespace(tree_cache=cache, can_run_list=[request(ids) for ids in batch], running_batch=SimpleNamespace(reqs=running))
        result = add_request(lambda self, req, has_chunked_req: "added", adder, candidate, has_chunked_req=False)
        assert result == ("waits" if waits and not disabled else "added")


class CountedIds(array):
    """The tokens of a request, which counts how often all of them are read."""

    reads = 0

    def tobytes(self) -> bytes:
        CountedIds.reads += 1
        return super().tobytes()


def test_a_batch_reads_each_request_a_few_times_only(monkeypatch):
    """Not once for each that waits: groups of 4 are asked for at once."""
    policy = SimpleNamespace(AddReqResult=SimpleNamespace(CONTINUE="waits"))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.schedule_policy", policy)
    adder = SimpleNamespace(tree_cache=SimpleNamespace(disable=False), can_run_list=[], running_batch=SimpleNamespace(reqs=[]))
    requests = [request([prompt, *LONG]) for prompt in range(100) for _ in range(4)]
    for each in requests:
        each.full_untruncated_fill_ids = CountedIds("q", each.full_untruncated_fill_ids)
        add_request(lambda self, req: self.can_run_list.append(req), adder, each)
    assert adder.can_run_list == requests[::4] and CountedIds.reads <= 2 * len(requests)


def test_the_tail_holds_a_stop_string_of_one_byte_tokens():
    request = SimpleNamespace(sampling_params=SimpleNamespace(stop_strs=["</a>", "é"]), output_ids=list(range(100)))
    assert count_tail_tokens(request, 1) == 5
    assert count_tail_tokens(request, 3) == 7
    request.output_ids = [1, 2]
    assert count_tail_tokens(request, 1) == 2


def test_children_are_forked_even_if_sglang_asks_for_spawn():
    before = multiprocessing.get_start_method(allow_none=True)
    try:
        fork_children(lambda method: multiprocessing.set_start_method(method, force=True), "spawn")
        assert multiprocessing.get_start_method() == "fork" and gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        multiprocessing.set_start_method(before, force=True)


def test_buffers_and_scales_of_the_cache_stay_and_weights_are_made_up():
    def fill(model: torch.nn.Module, value: float) -> None:
        for tensor in model.state_dict().values():
            tensor.fill_(value)

    model = torch.nn.Module()
    model.weight = model.tied = torch.nn.Parameter(torch.zeros(2, 2))
    model.attn = torch.nn.Module()
    model.attn.k_scale, model.attn.kv_scales = torch.nn.Parameter(torch.tensor(-1.0)), torch.nn.Parameter(torch.ones(2))
    model.register_buffer("table", torch.arange(3.0))
    make_up_weights(fill, model, 7.0)
    assert model.attn.k_scale == -1 and (model.attn.kv_scales == 1).all() and model.table.tolist() == [0, 1, 2]
    assert (model.weight == 7).all() and model.tied is model.weight
