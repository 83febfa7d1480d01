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


def test_blackwell_has_twice_the_rates_of_hopper_and_more():
    for name in ("b200", "gb200", "b300"):
        gpu, hopper_gpu = GPUS[name], GPUS["h200"]
        assert gpu.capability[0] == 10 and gpu.rates["fp8"] == 2 * gpu.rates["bf16"]
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
