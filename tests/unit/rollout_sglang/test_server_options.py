"""`[rollout.sglang]`: which arguments are allowed or refused. SGLang is not imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megatron_rl.errors import UserError
from rollout_sglang import server_options
from rollout_sglang.server_options import EXCEPTIONS, GROUPS, SET_BY, check, make_arguments, read_arguments

USEFUL = {
    "mem_fraction_static": 0.8,
    "max_prefill_tokens": 32768,
    "schedule_policy": "lpm",
    "schedule_conservativeness": 1,
    "cuda_graph_bs_decode": [1, 2, 4],
    "disable_cuda_graph": False,
    "disable_custom_all_reduce": True,
    "watchdog_timeout": 600.0,
}


def test_what_large_models_need_passes():
    check(USEFUL)
    graphs = ["--cuda-graph-bs-decode", "1", "2", "4"]
    assert make_arguments(USEFUL)[-7:] == [*graphs, "--disable-custom-all-reduce", "--watchdog-timeout", "600.0"]
    assert "--disable-cuda-graph" not in make_arguments(USEFUL)
    assert make_arguments({"extra_metric_labels": {"run": "a"}}) == ["--extra-metric-labels", '{"run": "a"}']


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"quantization": "fp8"}, "rollout.sglang.quantization = 'fp8': is set by precision.mode; set precision.mode"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "is set by precision.kv"),
        ({"attention_backend": "triton"}, "computes with a different kernel than the precision graph says; leave it out"),
        ({"moe_runner_backend": "deep_gemm"}, "computes with a different kernel"),
        ({"speculative_algorithm": "EAGLE"}, "samples proposals of another model, which nothing proves"),
        ({"custom_weight_loader": ["m.f"]}, "sets the served model or its format"),
        ({"enable_hierarchical_cache": True}, "keeps keys and values of older weights"),
        ({"enable_dp_attention": True}, "places ranks or weights where the sync does not expect them"),
        ({"enable_torch_compile": True}, "computes with a different kernel"),
        ({"lora_paths": ["a"]}, "serves weights that no sync fills and proves"),
        ({"mem_fraction": 0.8}, "is not a server argument of SGLang; did you mean mem_fraction_static?"),
        ({"mem_fraction_static": "most"}, "must be of type float"),
        ({"disable_cuda_graph": 1}, "must be of type bool"),
        ({"max_prefill_tokens": True}, "must be of type int"),
        ({"_swa_full_tokens_ratio_explicitly_set": True}, "is not a server argument of SGLang"),
    ],
)
def test_what_would_break_a_promise_is_refused_by_name(options, line):
    with pytest.raises(UserError) as refused:
        check(options)
    assert line in str(refused.value)


def test_the_table_is_of_this_sglang():
    """A new release may add groups and remove names. The names in the table exist, and every argument is decided."""
    known = read_arguments()
    assert len(known) > 400 and {argument.group for argument in known.values()} == GROUPS.keys()
    assert EXCEPTIONS.keys() | SET_BY.keys() <= known.keys()
    for name, reason in EXCEPTIONS.items():
        assert reason != GROUPS[known[name].group], name  # it would be no exception


def test_an_unknown_group_is_refused(monkeypatch):
    monkeypatch.setattr(server_options, "GROUPS", {})
    with pytest.raises(UserError, match="is of a kind that is unknown to this project"):
        check({"mem_fraction_static": 0.8})


def test_without_sglang_the_table_alone_decides(monkeypatch):
    monkeypatch.setattr(server_options, "read_arguments", dict)
    check({"anything": 1})
    with pytest.raises(UserError, match="is set by rollout.tp"):
        check({"tp_size": 2})


def test_sglang_is_read_not_imported():
    asked = "import sys; from rollout_sglang.server_options import check; check({'log_level': 'info'})"
    code = f"{asked}; print('sglang' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
