"""GPUs and links, with one-directional bandwidths and rates from the data sheets, and the share of them that estimates assume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_rl.errors import UserError

GIB = 1 << 30
MIB = 1 << 20

COMPUTE_EFFICIENCY = {"fp8": 0.7, "int8": 0.7, "fp8 WGrad": 0.45, "bf16": 0.77, "fp32": 0.77, "attention": 0.3}
"""Kind of product -> share of the dtype's peak rate that kernels reach. Measured on one H200, alone and within an update of 8B's widths
(benchmarks/h200): FP8 1,300 to 1,480 TFLOP/s, weight gradients from FP8 operands 800 to 1,000, BF16 700 to 835, FlashAttention 2 about
300. The shares of INT8 and FP32, and those of other GPUs, are assumed to be equal."""
LINK_EFFICIENCY = 0.7
"""Share of the bandwidth of links and HBM that estimates use. An assumption."""
CACHE_BANDWIDTH = 5.5e12
"""Bytes/s from Hopper's L2 cache to all multiprocessors. An assumption; data sheets do not list it."""
NETWORK_BANDWIDTH = 50e9
"""Bytes/s per direction of a GPU's own network adapter (400 Gbit/s, one per GPU, as in NVIDIA's reference nodes)."""
MAX_GPUS = 1 << 14
"""Largest cluster that `plan` searches and `rehearse` fakes. The time of the search grows with it."""


@dataclass(frozen=True)
class Gpu:
    """A GPU model. Bandwidths in bytes/s, rates in FLOP/s without sparsity."""

    name: str
    memory: int
    """Bytes, as nvidia-smi reports them."""
    hbm: float
    nvlink: float
    """Bandwidth to the other GPUs of the node."""
    bf16: float
    fp8: float
    capability: tuple[int, int] = (9, 0)
    """CUDA compute capability."""
    processors: int = 132
    """Streaming multiprocessors."""
    nvlink_domain: int = 8
    """GPUs that NVLink connects: those of one node, or of one rack."""

    def product_seconds(self, flops: Mapping[str, float]) -> float:
        """Return the seconds that matrix products of these FLOPs, by kind, take. Unknown kinds are ignored."""
        return sum(count / self.rates[kind] for kind, count in flops.items() if kind in self.rates)

    def memory_seconds(self, nbytes: float) -> float:
        return nbytes / (self.hbm * LINK_EFFICIENCY)

    @cached_property
    def rates(self) -> dict[str, float]:
        """FLOP/s that products reach, by kind: the dtype of the operands, `fp8 WGrad`, or `attention` (in BF16)."""
        peaks = {"fp8": self.fp8, "int8": self.fp8, "fp8 WGrad": self.fp8, "bf16": self.bf16, "fp32": self.bf16 / 2, "attention": self.bf16}
        return {kind: peak * COMPUTE_EFFICIENCY[kind] for kind, peak in peaks.items()}


GPUS = {
    "h100": Gpu("H100 SXM 80GB", 81559 * MIB, 3.35e12, 450e9, 989e12, 1979e12),
    "h200": Gpu("H200 SXM 141GB", 143771 * MIB, 4.8e12, 450e9, 989e12, 1979e12),
    "h800": Gpu("H800 SXM 80GB", 81559 * MIB, 3.35e12, 200e9, 989e12, 1979e12),
    "h20": Gpu("H20 SXM 96GB", 97871 * MIB, 4.0e12, 450e9, 148e12, 296e12, processors=78),
    "b200": Gpu("B200 180GB", 183359 * MIB, 8e12, 900e9, 2.25e15, 4.5e15, (10, 0), 148),
    "gb200": Gpu("GB200 186GB", 189471 * MIB, 8e12, 900e9, 2.5e15, 5e15, (10, 0), 152, 72),
    "b300": Gpu("B300 288GB", 275040 * MIB, 8e12, 900e9, 2.25e15, 4.5e15, (10, 3), 148),
}
"""The GPUs that the FP8 backends support, from NVIDIA's data sheets (Blackwell: DGX B200, GB200 NVL72 divided by its 72 GPUs, HGX B300).
Rates of Blackwell are the dense halves of the published sparse ones."""


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal size. GPU g belongs to node g // gpus_per_node."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu

    @classmethod
    def from_options(cls, nodes: int | None, gpus_per_node: int, gpu: str, needed_gpus: int = 0) -> Cluster:
        """Return the cluster of the command line; without `nodes`, as many nodes as `needed_gpus` fill.

        Raise UserError for sizes that are not positive or above any real cluster, and for unknown GPUs.
        """
        nodes = -(-needed_gpus // max(gpus_per_node, 1)) if nodes is None else nodes
        for option, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
            if value < 1:
                raise UserError(option, value, "must be a positive number", "give 1 or more")
        if nodes * gpus_per_node > MAX_GPUS:
            rule = f"with {gpus_per_node} GPUs each are more than the {MAX_GPUS:,} GPUs that can be planned"
            raise UserError("--nodes", nodes, rule, "give a smaller cluster, or use smaller layouts")
        if gpu.lower() not in GPUS:
            raise UserError("--gpu", gpu, "is not known", f"use one of {', '.join(GPUS)}")
        return cls(nodes, gpus_per_node, GPUS[gpu.lower()])

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def node_of(self, gpu: int) -> int:
        return gpu // self.gpus_per_node

    def link_bandwidth(self, first: int, last: int) -> float:
        """Return the bytes/s that each GPU sends within a group that spans the GPUs `first` to `last`."""
        connected = first // self.nvlink_gpus == last // self.nvlink_gpus
        return (self.gpu.nvlink if connected else NETWORK_BANDWIDTH) * LINK_EFFICIENCY

    def exchange_seconds(self, kind: str, ranks: Sequence[int], nbytes: float) -> float:
        """Return the seconds in which a rank sends `nbytes` within a group. If NVLink does not connect the group, all bytes cross the
        network, except those of an all-to-all for the ranks that NVLink connects: these travel beside the others."""
        bandwidth = self.link_bandwidth(min(ranks), max(ranks))
        if kind != "all-to-all" or len(ranks) == 1:
            return nbytes / bandwidth
        near = min(Counter(rank // self.nvlink_gpus for rank in ranks).values()) - 1
        each = nbytes / (len(ranks) - 1)
        far = len(ranks) - 1 - near
        return max(near * each / (self.gpu.nvlink * LINK_EFFICIENCY), far * each / bandwidth)

    @property
    def nvlink_gpus(self) -> int:
        """Number of GPUs that NVLink connects: those of a node, or of as many whole nodes as a rack with NVLink has."""
        return max(self.gpu.nvlink_domain // self.gpus_per_node, 1) * self.gpus_per_node

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes} of {self.gpus_per_node} {self.gpu.name}"
