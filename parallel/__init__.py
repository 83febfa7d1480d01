"""Layouts, block geometry, the reshard plan and its proof. Knows neither the RL loop nor SGLang; no heavy imports here."""

PROJECT = "megatron-rl"  # `parallel` is a common name: megatron_rl/__init__.py refuses a package without this mark
