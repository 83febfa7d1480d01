"""A SLURM for tests: Debian's packages, unpacked into a folder, with a controller and node daemons on this machine.

Nothing is installed, no package script runs, and an installed SLURM is not touched. The daemons have their own ports and folders, and are
ended by pid.
"""

import getpass
import os
import secrets
import shutil
import socket
import subprocess

import psutil
from support.processes import alive_after, end, family, free_port, until

_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_LIBRARIES = "usr/lib/x86_64-linux-gnu"


class NoSlurmError(Exception):
    """The reason why SLURM is not available."""


def unpack_slurm(folder):
    """Download Debian's SLURM and its missing dependencies, and unpack them. Return the folder that replaces /. Raise NoSlurmError on
    failure."""
    if not all(map(shutil.which, ("apt-get", "dpkg-deb"))):
        raise NoSlurmError("there is no apt-get here")
    archives, root = folder / "archives", folder / "root"
    (archives / "partial").mkdir(parents=True)
    options = f"Debug::NoLocking=1 Dir::Cache::archives={archives} APT::Sandbox::User= Acquire::Retries=1 Acquire::http::Timeout=20".split()
    settings = [word for option in options for word in ("-o", option)]
    command = ["apt-get", *settings, "install", "--yes", "--download-only", "--no-install-recommends"]
    try:
        done = subprocess.run([*command, *_PACKAGES], capture_output=True, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        raise NoSlurmError("apt-get did not get it within 90 s") from None
    if done.returncode:
        raise NoSlurmError(f"apt-get does not get it: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg-deb", "--extract", archive, root], check=True, timeout=60)
    if not (root / "usr/sbin/slurmctld-wlm").exists():
        raise NoSlurmError("it is installed already, and apt-get does not fetch it again")
    return root


class Cluster:
    """A cluster of nodes node1, node2, ...; use it in a `with` block. `run` runs sbatch, scontrol and the like."""

    def __init__(self, root, folder, size):
        self._root, self.folder, self._size = root, folder, size
        libraries = root / _LIBRARIES
        path = f"{folder}/bin:{root}/usr/bin:{os.environ['PATH']}"
        self.env = {"PATH": path, "LD_LIBRARY_PATH": f"{libraries}:{libraries}/slurm-wlm", "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons = []

    def __enter__(self):
        (self.folder / "state").mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self._configure()
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def run(self, *words, seconds=90, env=None):
        """Run a client's command; return its output. Raise AssertionError if it fails."""
        environment = {**os.environ, **self.env, **(env or {})}
        done = subprocess.run(list(map(str, words)), env=environment, cwd=self.folder, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout.strip()

    def job(self, number):
        """Return the controller's record of a job."""
        return dict(part.split("=", 1) for part in self.run("scontrol", "--oneliner", "show", "job", number).split() if "=" in part)

    def logs(self):
        """Return the ends of the daemons' logs."""
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(self.folder.glob("*.log")))

    def close(self):
        """End the daemons, and processes of jobs, which have no daemon as parent."""
        end(process for daemon in self._daemons for process in family(daemon.pid))
        for daemon in self._daemons:
            daemon.wait(timeout=10)
        end(process for process in psutil.process_iter() if self._is_ours(process))
        assert alive_after([process for process in psutil.process_iter() if self._is_ours(process)], 10) == []

    def _is_ours(self, process):
        """Return whether a process is one of our programs (slurmstepd overwrites its environment), or was given our slurm.conf."""
        try:
            return process.exe().startswith(f"{self._root}/") or process.environ().get("SLURM_CONF") == self.env["SLURM_CONF"]
        except psutil.Error:
            return False

    def _start_all(self):
        socket_file, sbin = self.folder / "munge.socket", self._root / "usr/sbin"
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self._start("munged", sbin / "munged", "--foreground", "--force", f"--socket={socket_file}", *files)
        until(socket_file.exists, 200, f"munged{self.logs()}")
        self._start("slurmctld", sbin / "slurmctld-wlm", "-D", "-c")
        for number in range(1, self._size + 1):
            self._start(f"node{number}", sbin / "slurmd-wlm", "-D", "-N", f"node{number}", "-d", sbin / "slurmstepd-wlm")
        until(self._is_up, 400, "nodes that are idle")

    def _start(self, name, *words):
        environment, nothing = {**os.environ, **self.env}, subprocess.DEVNULL
        with (self.folder / f"{name}.log").open("wb") as log:
            command = list(map(str, words))
            self._daemons.append(subprocess.Popen(command, env=environment, stdin=nothing, stdout=log, stderr=log, start_new_session=True))

    def _is_up(self):
        assert all(daemon.poll() is None for daemon in self._daemons), self.logs()
        command = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        done = subprocess.run(command, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=90)
        return done.stdout.strip() == str(self._size)

    def _configure(self):
        host, user = socket.gethostname(), getpass.getuser()
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmUser": user,
            "SlurmdUser": user,
            "SlurmctldPort": free_port(),
            "PluginDir": self._root / _LIBRARIES / "slurm-wlm",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": f"{self.folder}/spool-%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/%n.pid",
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            "AuthInfo": f"socket={self.folder}/munge.socket,cred_expire=5",  # a job that is requeued waits so long
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_Core",
            "SlurmdParameters": "config_overrides",  # CPUs as written below, whatever this machine has
            "SchedulerParameters": "sched_interval=2,bf_interval=2",
            "KillWait": 20,
            "MessageTimeout": 60,  # seconds; this machine may be busy
            "BatchStartTimeout": 60,
            "ReturnToService": 2,
            "MpiDefault": "none",
        }
        nodes = [
            f"NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 State=UNKNOWN"
            for number in range(1, self._size + 1)
        ]
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [*nodes, "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
