"""Parallel layouts, block geometry, the reshard plan and its transports. Independent of the RL loop and SGLang; no heavy imports here."""

PROJECT = "megatron-rl"  # `parallel` is a common name: megatron_rl/__init__.py refuses a package without this mark
