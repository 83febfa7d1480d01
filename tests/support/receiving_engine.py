"""An engine that only receives weights, in the test's own process, without SGLang or a model."""

import time

from megatron_rl.rollout.engine import ServedReport
from parallel.digest import digest_all, make_stored_tensors
from rollout_sglang.weight_receiver import WeightReceiver


class ReceivingEngine:
    """An engine for `WeightSync`: tensors of every engine rank in this process, filled by the engine's own receivers."""

    def __init__(self, plan):
        self.tensors = {rank: make_stored_tensors(shards, plan.contract.format_of) for rank, shards in plan.targets.items()}
        self.receivers = {}

    def connect(self, link, chunks, staged):
        for rank, tensors in self.tensors.items():
            self.receivers[rank] = WeightReceiver(link, rank, [chunk for chunk in chunks if chunk.target == rank], tensors, staged)

    def start_receiving(self, hashing, places=None):
        for rank, receiver in self.receivers.items():
            receiver.start(self.tensors[rank], hashing, places and places[rank])

    def finish_receiving(self, hashing):
        return {rank: receiver.finish(self.tensors[rank], hashing) for rank, receiver in self.receivers.items()}

    def start_rereading(self):
        for rank, receiver in self.receivers.items():
            receiver.start_rereading(self.tensors[rank])

    def finish_rereading(self):
        while None in (digests := {rank: receiver.finish_rereading() for rank, receiver in self.receivers.items()}).values():
            time.sleep(0.001)
        return digests

    def digest_rects(self, rects_by_rank):
        return {rank: digest_all(self.tensors[rank], rects) for rank, rects in rects_by_rank.items()}

    def account_for_tensors(self):
        return [ServedReport()] * len(self.receivers)

    def disconnect(self):
        for receiver in self.receivers.values():
            receiver.close()

    def pause(self, running): ...
    def admit(self): ...
    def resume(self): ...
    def begin_sync(self): ...
    def end_sync(self, version): ...
