"""Everything by which a run compares its trainer with its engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_rl.batch.training_sample import TrainingSample
from megatron_rl.config import Config
from megatron_rl.diagnosis.attribution import MismatchAttribution
from megatron_rl.diagnosis.canary import make_canary, promises_exactness
from megatron_rl.diagnosis.draws import DrawCheck
from megatron_rl.diagnosis.graph_check import check_graph, write_critic_graph
from megatron_rl.diagnosis.locate import Locator, try_to_locate
from megatron_rl.diagnosis.mismatch import MismatchBound, find_worst_prefix
from megatron_rl.distributed import Rank0
from megatron_rl.errors import MismatchError
from megatron_rl.mcore.actor import Actor, Critic
from megatron_rl.precision.contract import PrecisionContract
from megatron_rl.rollout.engine_pool import EnginePool
from megatron_rl.sync.plan import SyncPlan

Search = Callable[[MismatchError, list[TrainingSample]], None]


class Diagnosis:
    """The canary of each sync, the bound on a step's mismatch, the test of draws, and the causes and the place of a mismatch."""

    def __init__(
        self,
        config: Config,
        actor: Actor,
        hf_config: dict[str, Any],
        read_named_tensors: Callable[[], dict[str, torch.Tensor]],
        notify: Callable[[str], None],
    ) -> None:
        """`read_named_tensors` returns the weights as the engines have them (`collect_named_tensors`)."""
        self._config, self._actor, self._hf_config = config, actor, hf_config
        self._read_named_tensors, self._notify = read_named_tensors, notify
        self._contract = contract = PrecisionContract.from_config(config.precision)
        self.canary = make_canary(config, actor, hf_config)
        self.exact = promises_exactness(config, hf_config)
        self.bound, self.draws = MismatchBound(config.sync, self.exact, notify), DrawCheck(config, self.exact, notify)
        self.attribution = MismatchAttribution(actor, read_named_tensors, contract.engine_format, contract.engine_alone_quantizes_kv)

    def check_graphs(self, engines: Rank0[EnginePool], folder: Path, critic: Critic | None) -> None:
        """Compare the precision graphs of trainer and engines, and write them and the critic's to `folder`. Collective. Raise RunError for
        a difference that the run does not allow."""
        check_graph(self._actor.model, engines, self._contract, folder, self.exact or self._contract.sums_by_ranks)
        if critic is not None:
            write_critic_graph(critic.model, folder)

    def make_search(self, engines: Rank0[EnginePool], plan: SyncPlan, folder: Path) -> Search:
        """Return a function of a mismatch and the samples in which it was found. It writes to `folder` where trainer and engines differ."""
        locator = Locator(self._config, self._actor, engines, plan, self._read_named_tensors, self._hf_config)

        def search(error: MismatchError, compared: list[TrainingSample]) -> None:
            self._notify(str(error))
            try_to_locate(locator, [[], find_worst_prefix(compared)], folder, self._notify)

        return search
