"""GPUs and links. Bandwidths and rates are those of the data sheets, in one direction; `roofline` assumes a share of them."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.errors import UserError

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU. Bandwidths in bytes/s, rates in FLOP/s without sparsity."""

    name: str
    memory: int
    """In bytes, as nvidia-smi reports it."""
    hbm: float
    nvlink: float
    """To the other GPUs of its node, in one direction."""
    bf16: float
    fp8: float


GPUS = {
    "h100": Gpu("H100 SXM 80GB", 81559 * MIB, 3.35e12, 450e9, 989e12, 1979e12),
    "h200": Gpu("H200 SXM 141GB", 143771 * MIB, 4.8e12, 450e9, 989e12, 1979e12),
    "h800": Gpu("H800 SXM 80GB", 81559 * MIB, 3.35e12, 200e9, 989e12, 1979e12),
    "h20": Gpu("H20 SXM 96GB", 97871 * MIB, 4.0e12, 450e9, 148e12, 296e12),
}
"""NVIDIA's data sheets of the Hopper GPUs that the FP8 back ends are written for."""

CACHE_BANDWIDTH = 5.5e12
"""Bytes/s from Hopper's L2 cache to all its multiprocessors. An assumption: data sheets do not say it."""

NETWORK_BANDWIDTH = 50e9
"""Bytes/s in one direction of a GPU's own network adapter (400 Gbit/s, one for each GPU, as in NVIDIA's reference nodes)."""

LINK_EFFICIENCY = 0.7
"""Share of a link's bandwidth, HBM's included, that estimates use. An assumption."""


@dataclass(frozen=True)
class Cluster:
    """`nodes` equal nodes; GPU g is in node g // gpus_per_node."""

    nodes: int
    gpus_per_node: int
    gpu: Gpu

    @classmethod
    def from_options(cls, nodes: int, gpus_per_node: int, gpu: str) -> Cluster:
        """Raise UserError for sizes below 1 and unknown GPUs."""
        for option, value in (("--nodes", nodes), ("--gpus-per-node", gpus_per_node)):
            if value < 1:
                raise UserError(option, value, "must be a positive number", "give 1 or more")
        if gpu.lower() not in GPUS:
            raise UserError("--gpu", gpu, "is not known", f"use one of {', '.join(GPUS)}")
        return cls(nodes, gpus_per_node, GPUS[gpu.lower()])

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def node_of(self, gpu: int) -> int:
        return gpu // self.gpus_per_node

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes} of {self.gpus_per_node} {self.gpu.name}"
