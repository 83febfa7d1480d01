"""An engine that only receives weights, in the test's own process, without SGLang or a model."""

import json
import time

from megatron_rl.rollout.engine import ServedReport
from parallel.chunking import decode_chunks
from parallel.digest import digest_all, make_stored_tensors
from rollout_sglang.proved_regions import ProvedRegions
from rollout_sglang.weight_receiver import WeightReceiver


def list_padding(shards):
    """Return (first row, end) of the padding of each vocabulary, as `find_padding` does for an engine's layers."""
    vocabularies = [shard for shard in shards if shard.role in ("embedding", "lm_head")]
    return {shard.name: (sum(region.tensor_rect.rows for region in shard.regions), shard.rows) for shard in vocabularies}


class ReceivingEngine:
    """An engine for `WeightSync`: tensors of every engine rank in this process, filled by the engine's own receivers."""

    def __init__(self, plan):
        self.tensors = {rank: make_stored_tensors(shards, plan.contract.format_of) for rank, shards in plan.targets.items()}
        self.padding = {rank: list_padding(shards) for rank, shards in plan.targets.items()}
        self.receivers, self.regions = {}, {}

    def connect(self, link, chunks, staged):
        for rank, tensors in self.tensors.items():
            own = decode_chunks(rank, chunks[rank])
            self.receivers[rank] = WeightReceiver(link, rank, own, tensors, staged)
            self.regions[rank] = ProvedRegions(own, tensors, self.padding[rank])

    def start_receiving(self, hashing, places=None):
        for rank, receiver in self.receivers.items():
            receiver.start(self.tensors[rank], hashing, places and json.loads(places[rank]))

    def finish_receiving(self, hashing):
        digests = {rank: receiver.finish(self.tensors[rank], hashing) for rank, receiver in self.receivers.items()}
        for rank, regions in self.regions.items():
            regions.fill_padding(self.tensors[rank])
        return digests

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
        return [self._account(rank) for rank in self.receivers]

    def _account(self, rank):
        try:
            size = self.regions[rank].check(self.tensors[rank])
        except ValueError as error:
            return ServedReport(wrong=str(error))
        return ServedReport(tensors=size.tensors, nbytes=size.nbytes)

    def disconnect(self):
        for receiver in self.receivers.values():
            receiver.close()

    def pause(self, running): ...
    def admit(self): ...
    def resume(self): ...
    def begin_sync(self): ...
    def end_sync(self, version): ...
