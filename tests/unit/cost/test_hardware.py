"""GPUs of a cluster: what NVLink connects, and what a rehearsal's device answers."""

import pytest
import torch
from support.processes import call_in_fresh_process

from megatron_rl.cost.hardware import GPUS, LINK_EFFICIENCY, NETWORK_BANDWIDTH, Cluster
from megatron_rl.rehearsal import hopper


@pytest.mark.parametrize("gpu, per_node, nodes, connected", [
    ("h100", 8, 2, 8), ("b200", 8, 2, 8), ("b300", 4, 4, 8), ("gb200", 4, 36, 72), ("gb200", 8, 18, 72), ("h100", 16, 2, 16),
])  # fmt: skip
def test_nvlink_ends_at_its_domain(gpu, per_node, nodes, connected):
    cluster = Cluster.from_options(nodes, per_node, gpu)
    nvlink, network = GPUS[gpu].nvlink * LINK_EFFICIENCY, NETWORK_BANDWIDTH * LINK_EFFICIENCY
    assert cluster.nvlink_gpus == connected
    assert cluster.link_bandwidth(0, connected - 1) == nvlink
    assert cluster.link_bandwidth(0, connected) == cluster.link_bandwidth(connected - 1, connected) == network


@pytest.mark.parametrize("ranks, far, near", [
    (range(8), 0, 1), (range(16), 8 / 15, 7 / 15), (range(0, 32, 2), 12 / 15, 3 / 15), ((0, 8), 1, 0), ((7, 8, 9), 1, 0), ((3,), 0, 1),
])  # fmt: skip
def test_an_all_to_all_sends_over_the_network_what_is_for_other_nodes(ranks, far, near):
    cluster = Cluster.from_options(4, 8, "h100")
    network, nvlink = NETWORK_BANDWIDTH * LINK_EFFICIENCY, GPUS["h100"].nvlink * LINK_EFFICIENCY
    assert cluster.exchange_seconds("all-to-all", ranks, 1e9) == pytest.approx(max(far * 1e9 / network, near * 1e9 / nvlink))
    whole = nvlink if len({rank // 8 for rank in ranks}) == 1 else network
    assert cluster.exchange_seconds("all-gather", ranks, 1e9) == 1e9 / whole


def test_blackwell_has_twice_the_rates_of_hopper_and_more():
    for name in ("b200", "gb200", "b300"):
        gpu, hopper_gpu = GPUS[name], GPUS["h200"]
        assert gpu.capability[0] == 10 and gpu.fp8 == 2 * gpu.bf16
        assert min(gpu.fp8 / hopper_gpu.fp8, gpu.nvlink / hopper_gpu.nvlink) >= 2 and gpu.memory > hopper_gpu.memory


def answers(name: str) -> tuple:
    hopper.become(GPUS[name])
    hopper.pretend()
    properties = torch.cuda.get_device_properties(0)
    return torch.cuda.get_device_capability(), torch.cuda.get_device_name(), properties.total_memory, properties.multi_processor_count


@pytest.mark.parametrize("name", ["h20", "b300"])
def test_a_pretended_gpu_is_the_clusters(name):
    gpu = GPUS[name]
    assert call_in_fresh_process(answers, name) == (gpu.capability, gpu.name, gpu.memory, gpu.processors)
