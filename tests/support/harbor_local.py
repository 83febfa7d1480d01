"""An environment of Harbor without a container: a folder of this machine, in which the container's folders lie."""

import asyncio
import re
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult


class LocalEnvironment(BaseEnvironment):
    @staticmethod
    def type():
        return "local"

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        self.root = Path(tempfile.mkdtemp(prefix="harbor-"))
        for name in ("app", "logs/agent", "logs/verifier", "logs/artifacts", "tests"):
            (self.root / name).mkdir(parents=True)

    async def stop(self, delete):
        await self.exec("tmux kill-server")
        shutil.rmtree(self.root)

    def _place(self, text):
        return re.sub(r"(?<![\w./-])/(app|logs|tests)\b", lambda match: f"{self.root}/{match[1]}", text)

    async def upload_file(self, source_path, target_path):
        Path(self._place(str(target_path))).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._place(str(target_path)))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._place(str(target_dir)), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self._place(str(source_path)), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._place(str(source_dir)), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.root), "TMUX_TMPDIR": str(self.root), **(env or {})}
        run = await asyncio.create_subprocess_exec(
            *("bash", "-c", self._place(command)),
            cwd=self._place(cwd or "/app"),
            env=environment,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, error = await asyncio.wait_for(run.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=error.decode(), return_code=run.returncode)
