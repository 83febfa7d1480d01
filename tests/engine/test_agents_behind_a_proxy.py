"""Agents behind a proxy that drops, delays, loses, and repeats: what is trained is what they have received, token for token."""

import json
import os
from collections import Counter
from pathlib import Path

import engine_checks
import pytest
import torch
from support.lossy_agents import FAULTS, FOLDER_VARIABLE
from support.train_command import TORCHRUN, finish, latest, read_numbers, read_rows, train

from examples.arithmetic.byte_tokenizer import SPECIAL_TOKENS

REPLICAS_AHEAD = {
    "agent.name": "support.lossy_agents:converse", "agent.tool_parser": "", "agent.timeout": 600, "agent.workers": 4,
    "reward.function": "support.agent_programs:judge", "rollout.max_new_tokens": 64, "log.samples": 8,
    "train.steps": 4, "train.layout.dp": 2, "rollout.engines": 2, "placement.kind": "disaggregated", "placement.max_staleness": 1,
    "algorithm.correction": "tis",
}  # fmt: skip


@pytest.mark.long
def test_what_is_trained_is_what_was_received(unified, tmp_path):
    asked = unified.call(engine_checks.sample_behind_a_proxy, 4, 200, tmp_path)[0]
    assert asked["errors"] == [""] * 4 and asked["notes"] == []
    for trained, noted in zip(asked["trained"], asked["received"], strict=True):
        assert trained == sorted(noted["received"]) and len(trained) == 6
    faults = Counter(fault for noted in asked["received"] for fault in noted["faults"])
    assert faults.total() > 24 and faults.keys() == set(FAULTS), faults
    assert torch.equal(asked["engine"], asked["trainer"])


def strip(text):
    """Return a text without special tokens, which responses leave out."""
    for token in SPECIAL_TOKENS:
        text = text.replace(token, "")
    return text


@pytest.mark.long
def test_a_run_with_two_replicas_that_samples_ahead_trains_what_its_agents_have_received(tmp_path, monkeypatch):
    """Chat completions, streams, responses, and messages."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "noted"))
    (tmp_path / "noted").mkdir()
    done = finish(train(tmp_path, REPLICAS_AHEAD, launcher=TORCHRUN, config="tool_agent"))
    assert done.code == 0, done.err
    noted = [json.loads(file.read_text()) for file in (tmp_path / "noted").iterdir()]
    received = Counter(tuple(strip(text) for text, _ in each["received"]) for each in noted)
    rows, samples = read_numbers(latest(tmp_path))[1:], read_rows(latest(tmp_path), "samples.jsonl")
    short = [row for row in samples if len(row["dialogue"]) != 5]
    assert not short, json.dumps(short)
    said = Counter(tuple(map(strip, row["dialogue"][::2])) for row in samples)
    assert said <= received and said.total() == 4 * 8, said - received
    assert [(row["agent/errors"], row["agent/conversations"], row.get("mismatch/abs_max", 0)) for row in rows] == [(0, 1, 0)] * 4
    assert {each["interface"] for each in noted} == {"_chat", "_stream", "_respond", "_message"}
    assert Counter(fault for each in noted for fault in each["faults"]).keys() == set(FAULTS)
