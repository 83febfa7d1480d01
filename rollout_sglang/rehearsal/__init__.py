"""Rehearsal of an engine rank: SGLang on a GPU without data. Started through `rollout_sglang.launch.rehearsal_command`."""
