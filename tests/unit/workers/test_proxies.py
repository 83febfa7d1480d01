"""The proxies of the environment, which calls inside a run do not use."""

import os
import subprocess
import sys

import httpx
import pytest
import requests
from requests.utils import should_bypass_proxies

from megatron_rl.config.reward import RewardFunctionConfig
from megatron_rl.errors import UserError
from megatron_rl.rewards.http import HttpRewardClient
from megatron_rl.workers.proxies import make_bypass, uses_proxy
from rollout_sglang import remote_columns

NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_this_machine_and_the_named_hosts_bypass_and_what_was_given_stays(monkeypatch):
    assert set(make_bypass(["10.0.0.5"]).values()) == {"127.0.0.1,localhost,::1,10.0.0.5"}
    monkeypatch.setenv("no_proxy", "10.0.0.0/8, .example.org")
    monkeypatch.setenv("NO_PROXY", "host")
    assert set(make_bypass().values()) == {"10.0.0.0/8,.example.org,host,127.0.0.1,localhost,::1"}
    monkeypatch.setenv("NO_PROXY", "*")
    assert set(make_bypass().values()) == {"*"}


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "192.168.1.5"])
def test_sglangs_own_client_calls_the_server_itself(monkeypatch, host):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "socks5://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "10.0.0.0/8")
    for name, value in make_bypass([host.strip("[]")]).items():
        monkeypatch.setenv(name, value)
    assert should_bypass_proxies(f"http://{host}:8000/health", None) and not should_bypass_proxies("http://example.org/", None)
    assert requests.utils.select_proxy(f"http://{host}:8000", requests.utils.get_environ_proxies(f"http://{host}:8000")) is None


def test_a_judge_uses_the_environments_proxy_unless_it_is_local_or_excepted(monkeypatch):
    monkeypatch.setenv("no_proxy", ".cluster.example,10.1.1.1")
    used = {url: uses_proxy(url) for url in ("http://judge:1/", "https://a.cluster.example", "http://10.1.1.1/", "http://127.0.0.2:1/")}
    assert list(used.values()) == [True, False, False, False]
    assert not uses_proxy("http://localhost:1/") and not uses_proxy("http://[::1]:1/")


@pytest.mark.parametrize("proxy", ["foo://127.0.0.1:9", "socks9://user:hunter2@127.0.0.1:9"])
def test_an_unusable_proxy_of_a_judge_is_one_line(monkeypatch, proxy):
    monkeypatch.setenv("ALL_PROXY", proxy)
    with pytest.raises(UserError, match="reward.functions.url = 'http://judge/': the environment's proxy cannot be used ") as error:
        HttpRewardClient(RewardFunctionConfig(name="http", url="http://judge/"))
    assert "hunter2" not in str(error.value) and "\n" not in str(error.value)
    HttpRewardClient(RewardFunctionConfig(name="http", url="http://127.0.0.1:1/"))


def test_kept_completions_are_fetched_without_a_proxy(monkeypatch):
    for name in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "foo://127.0.0.1:9")
    remote_columns._connect.cache_clear()
    with pytest.raises(ValueError, match="scheme"):
        httpx.Client()
    assert remote_columns._connect()._mounts == {}
    remote_columns._connect.cache_clear()


def test_a_download_through_an_unusable_proxy_is_one_line(tmp_path):
    environment = os.environ | {"HF_HOME": str(tmp_path), "ALL_PROXY": "foo://127.0.0.1:9", "HF_HUB_OFFLINE": ""}
    code = (
        "from pathlib import Path\nfrom megatron_rl.cli.main import expected_errors\nfrom megatron_rl.hf.hub import pin_hub_model\n"
        "with expected_errors(): pin_hub_model(Path('hf:owner/name'))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "Unknown scheme for proxy URL" in done.stderr and "its proxy" in done.stderr
