"""Secrets are masked in lines, data and pages, and refused in a configuration."""

import html
import json
import pickle

import pytest
from typer.testing import CliRunner

from megatron_rl import redaction
from megatron_rl.cli.main import app
from megatron_rl.config import load_config
from megatron_rl.errors import RunError, UserError
from megatron_rl.redaction import find_secret, redact, redact_data

AGENT_KEY = "mrl-" + "0f" * 16


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch):
    monkeypatch.setattr(redaction, "_secrets", set())
    monkeypatch.setattr(redaction, "_variables", set())


@pytest.mark.parametrize("text, expected", [
    ("https://host:8000/score", None),
    ("url = 'https://me:pass-word@host/x': is bad", "url = 'https://***@host/x': is bad"),
    ("https://token-only@host", "https://***@host"),
    ("https://me:pa@ss@host/", "https://***@host/"),
    ("https://me:pa/s?s#@host/", "https://***@host/"),
    ("postgresql+psycopg://me:pw@host:5432/runs", "postgresql+psycopg://***@host:5432/runs"),
    ("s3://bucket/key?versionId=3", None),
    ("https://github.com/a/b@main", None),
    ("https://host:80/a@b", None),
    ("hf:owner/name@main and me@example.org", None),
    ("https://host/x?token=abc&n=1", "https://host/x?token=***&n=1"),
    ("https://host/x?n=1&api_key=abc;sig=d#access_token=e", "https://host/x?n=1&api_key=***;sig=***#access_token=***"),
    ("https://host/x?X-Amz-Signature=abc&X-Amz-Credential=d", "https://host/x?X-Amz-Signature=***&X-Amz-Credential=***"),
    ("https://host/x?tokens=8&monkey=1", None),
    ('{"url":"http://a:b@c","next":"d@e"}', '{"url":"http://***@c","next":"d@e"}'),
    ("https://host/x?a=1&amp;token=abc", "https://host/x?a=1&amp;token=***"),
    (f"the agent printed {AGENT_KEY}", "the agent printed ***"),
    ("hf_" + "a" * 34, "***"),
    ("sk-proj-" + "a" * 30, "***"),
])  # fmt: skip
def test_user_names_and_tokens_in_urls_and_tokens_of_known_forms_are_masked(text, expected):
    assert redact(text) == (text if expected is None else expected)


def test_long_lines_take_no_time_to_search():
    text = "a" * 2_000_000 + "://" + "b:" * 1_000_000 + "?" + "token" * 100_000
    assert len(redact(text)) == len(text)


@pytest.mark.parametrize("name, value, is_masked", [
    ("HF_TOKEN", "correct horse battery", True),
    ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG", True),
    ("PGPASSWORD", "password1", True),
    ("MEGATRON_RL_ENGINE_KEY", "ab" * 24, True),
    ("HOME_FOLDER", "correct horse battery", False),
    ("MONKEY", "correct horse battery", False),
    ("SHORT_TOKEN", "train", False),  # a word of many lines
])  # fmt: skip
def test_variables_that_hold_secrets_are_masked_by_their_names(monkeypatch, name, value, is_masked):
    monkeypatch.setenv(name, value)
    assert redact(f"before {value} after") == ("before *** after" if is_masked else f"before {value} after")


def test_secrets_are_masked_however_they_are_written():
    secret = 'p"a\\s<s>\u00fc w'
    redaction.hold(secret)
    for written in (secret, json.dumps(secret), json.dumps(secret, ensure_ascii=False), html.escape(secret), repr(secret), f"a{secret}b"):
        assert "s<s" not in redact(written) and "s&lt;s" not in redact(written) and "***" in redact(written)
    data = {"rows": [{"text": f"x {secret}", "number": 1.5, "none": None}], secret: (secret, True)}
    assert redact_data(data) == {"rows": [{"text": "x ***", "number": 1.5, "none": None}], "***": ["***", True]}


def test_numbers_that_equal_a_secret_stay_numbers():
    redaction.hold("12345678")
    assert redact_data({"tokens": 12345678, "text": "12345678"}) == {"tokens": 12345678, "text": "***"}


def test_errors_mask_secrets_also_after_pickling():
    redaction.hold("sesame-seeds")
    error = UserError("data.train", "http://me:pw@host/x", "the server says sesame-seeds", "ask sesame-seeds")
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == "data.train = 'http://***@host/x': the server says ***; ask ***"
    broken = RunError("lost sesame-seeds", log_tail="line\nsesame-seeds\n")
    assert (str(broken), broken.log_tail) == ("lost ***", "line\n***\n")


SCORE = '--reward.functions=[{name = "http", url = "http://host/score", token_env = "%s"}]'
REFUSED = {
    "reward.functions.0.url = 'https://***@host/score': contains a user name or a token in a URL, and a run writes": (
        '--reward.functions=[{name = "http", url = "https://me:sesame@host/score"}]'
    ),
    "reward.functions.0.url = 'http://host/score?token=***': contains": (
        '--reward.functions=[{name = "http", url = "http://host/score?token=sesame"}]'
    ),
    "reward.functions.0.url = '***': contains": '--reward.functions=[{name = "http", url = "http://me:s\'sesame@host/"}]',
    "data.train = 'https://***@host/rows.jsonl': contains": "--data.train=https://sesame@host/rows.jsonl",
    "data.eval = ": '--data.eval=["https://host/rows.jsonl?X-Amz-Signature=sesame"]',
    "data.train.0.source = 'https://***@host/rows.jsonl': contains": '--data.train=[{source = "https://me:sesame@host/rows.jsonl"}]',
    "model.path = 'https://***@hub/owner/name': contains": "--model.path=https://me:sesame@hub/owner/name",
    "log.dir = 's3://***@bucket/runs': contains": "--log.dir=s3://id:sesame@bucket/runs",
    "data.settings.uri = 'postgresql://***@db/x': contains": "--data.settings.uri=postgresql://me:sesame@db/x",
    "algorithm.loss_settings.api_key = '***': contains a secret": "--algorithm.loss_settings.api_key=sesame",
    "agent.command = '***': contains a secret as an argument": '--agent.command=["solve", "--api-key", "sesame"]',
    "agent.command = ": '--agent.command=["solve", "--token=sesame"]',
    "reward.functions.0.token_env = '***': must be the name of an environment variable": SCORE % "sesame",
    "reward.functions.0.url = '***': contains a user name": '--reward.functions=[{name = "http", url = "me:sesame@host/score"}]',
}


@pytest.mark.parametrize("line, override", REFUSED.items())
def test_a_secret_in_the_configuration_is_refused_without_saying_it(tmp_path, line, override):
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n')
    result = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), override])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"megatron-rl: {line}")
    assert "sesame" not in result.output


@pytest.mark.parametrize("override", [
    "--data.train=hf:openai/gsm8k@main:train",
    "--data.train=https://host:8080/rows.jsonl?split=train",
    '--data.chat_template_kwargs={eos_token = "</s>"}',
    '--agent.command=["solve", "--max-tokens", "5"]',
    "--data.prompt_template=Mail {question} to me@example.org",
])  # fmt: skip
def test_settings_without_secrets_are_accepted(tmp_path, override):
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n')
    assert load_config(tmp_path / "run.toml", [override])


def test_the_variable_that_a_configuration_names_is_masked(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text('[model]\npath = "m"\n')
    monkeypatch.setenv("SCORER", "open")
    assert redact("open") == "open"
    load_config(tmp_path / "run.toml", [SCORE % "SCORER"])
    assert redact("open") == "***"


@pytest.mark.parametrize("value, found", [
    ([], False), ({}, False), ([""], False), (["--api-key"], False), (["--api-key", "x"], True), (["--api-key", ""], False),
    (["run", "--api-key=x"], True), ([[], {"a": []}], False), ([{"url": "https://me:pass@host"}], True), (None, False), (5, False),
])  # fmt: skip
def test_secrets_in_values_of_any_shape_are_found(value, found):
    assert bool(find_secret("arguments", value)) is found
