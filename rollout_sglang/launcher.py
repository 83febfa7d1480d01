"""Launcher of one engine's server: starts its processes, waits until it is healthy, and stops it."""

from __future__ import annotations

import sys
import time

import httpx

from megatron_rl.errors import RunError
from rollout_sglang.launch_args import EngineLaunchSpec

_POLL_SECONDS = 0.5
_KEEP_ALIVE_SECONDS = 2.0  # idle connections are closed before SGLang closes them after 5 s, possibly while a request is on its way


class EngineServer:
    """The running server of one engine, with its processes on all nodes. Creating it starts the processes without waiting for them."""

    def __init__(self, launch_spec: EngineLaunchSpec) -> None:
        self._launch_spec, self._rollout = launch_spec, launch_spec.config.rollout
        self._start()

    def _start(self) -> None:
        self.processes, self.url, self.api_key = self._launch_spec.start_process()

    def connect(self) -> httpx.Client:
        """Return an HTTP client that sends the server's key."""
        headers, limits = {"Authorization": f"Bearer {self.api_key}"}, httpx.Limits(keepalive_expiry=_KEEP_ALIVE_SECONDS)
        return httpx.Client(base_url=self.url, headers=headers, timeout=self._rollout.request_timeout, limits=limits)

    def wait_until_ready(self) -> None:
        """Wait until the server is healthy. If another program took one of its ports, start it once more with other ports. If it ends or
        is not healthy within `rollout.start_timeout` seconds, stop it and raise RunError with the tail of its log."""
        try:
            try:
                self._wait_until_healthy()
            except RunError as error:
                if "address already in use" not in error.log_tail.lower():
                    raise
                print("megatron-rl: another program took a port of the engine; starting the engine again", file=sys.stderr)
                self.stop()
                self._start()
                self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def _wait_until_healthy(self) -> None:
        """Return when `/health` answers, which needs no key."""
        seconds = self._rollout.start_timeout
        deadline = time.monotonic() + seconds
        with self.connect() as http:
            while time.monotonic() < deadline:
                if self.processes.has_ended():
                    raise self.make_error(f"the engine did not start ({self.processes.describe_end()})")
                try:
                    if http.get("/health", timeout=5).status_code == httpx.codes.OK:
                        self.processes.remember_children()
                        return
                except httpx.TransportError:
                    pass
                time.sleep(_POLL_SECONDS)
        raise self.make_error(f"the engine was not healthy after {seconds:g} s (rollout.start_timeout)")

    def stop(self, force: bool = False) -> None:
        """Terminate the processes, or kill them with `force`. Idempotent."""
        self.processes.kill() if force else self.processes.stop()

    def make_error(self, message: str, error_class: type[RunError] = RunError) -> RunError:
        """Return an error that names the log and holds its tail."""
        return error_class(f"{message}; log: {self.processes.log}", self.processes.log_tail())
