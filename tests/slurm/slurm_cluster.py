"""A SLURM for tests: Debian's packages, unpacked into a folder, with a controller on the first node and a daemon on each node of
`support/nodes.py`. An installed SLURM is not touched."""

import getpass
import os
import secrets
import subprocess

from support.debian import LIBRARIES
from support.processes import alive_after, end, until

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAM = "usr/sbin/slurmctld-wlm"


class Cluster:
    """The SLURM of some nodes, which see `root` and `folder`; use it in a `with` block. `run` runs sbatch, scontrol and the like."""

    def __init__(self, root, folder, nodes):
        self._root, self.folder, self.nodes = root, folder, nodes
        libraries = root / LIBRARIES
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
        command = [*self.nodes[0].prefix, "env", f"--chdir={self.folder}", *map(str, words)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout.strip()

    def job(self, number):
        """Return the controller's record of a job."""
        return dict(part.split("=", 1) for part in self.run("scontrol", "--oneliner", "show", "job", number).split() if "=" in part)

    def logs(self):
        """Return the ends of the daemons' logs."""
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in sorted(self.folder.glob("*.log")))

    def close(self):
        """End the daemons and the processes of jobs."""
        end(process for node in self.nodes for process in node.list_processes())
        for daemon in self._daemons:
            daemon.wait(timeout=10)
        assert alive_after([process for node in self.nodes for process in node.list_processes()], 10) == []

    def _start_all(self):
        socket_file, sbin = self.folder / "munge.socket", self._root / "usr/sbin"
        files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        first = self.nodes[0]
        self._start(first, "munged", sbin / "munged", "--foreground", "--force", f"--socket={socket_file}", *files)
        until(socket_file.exists, 200, f"munged{self.logs()}")
        self._start(first, "slurmctld", sbin / "slurmctld-wlm", "-D", "-c")
        for node in self.nodes:
            self._start(node, node.name, sbin / "slurmd-wlm", "-D", "-N", node.name, "-d", sbin / "slurmstepd-wlm")
        until(self._is_up, 400, "nodes that are idle")

    def _start(self, node, name, *words):
        environment, nothing = {**os.environ, **self.env}, subprocess.DEVNULL
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [*node.prefix, *map(str, words)]
            self._daemons.append(subprocess.Popen(command, env=environment, stdin=nothing, stdout=log, stderr=log, start_new_session=True))

    def _is_up(self):
        assert all(daemon.poll() is None for daemon in self._daemons), self.logs()
        command = [*self.nodes[0].prefix, "sinfo", "--noheader", "--states=idle", "--partition=all", "--format=%D"]
        done = subprocess.run(command, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=90)
        return done.stdout.strip() == str(len(self.nodes))

    def _configure(self):
        first, user = self.nodes[0], getpass.getuser()
        settings = {
            "ClusterName": "test",
            "SlurmctldHost": f"{first.name}({first.address})",
            "SlurmUser": user,
            "SlurmdUser": user,
            "PluginDir": self._root / LIBRARIES / "slurm-wlm",
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
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "ReturnToService": 2,
            "MpiDefault": "none",
        }
        nodes = [f"NodeName={node.name} NodeHostname={node.name} NodeAddr={node.address} CPUs=8 State=UNKNOWN" for node in self.nodes]
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [*nodes, "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1"]
        lines += ["PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2"]  # it preempts jobs of the other one
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
