"""Nodes of a cluster on this machine: namespaces of network, mounts, IPC, and host names, joined by a bridge in a namespace of its own.

Each node has an IPv4 and an IPv6 address, a host name that its hosts file maps to 127.0.1.1 as Debian does, a loopback interface, /tmp, and
/dev/shm of its own. The repository and one folder are shared, as a cluster's file system is. Processes have one numbering, so tests can
count and end them.
"""

import os
import shlex
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from support.debian import LIBRARIES, unpack_packages
from support.processes import ROOT, Command, end, one_thread_environment, until

_NAMESPACES = ("--net", "--mount", "--uts", "--ipc")


class Mirror:
    """A file system of its own (FUSE) through which a node sees the shared folder, so that it can be held and taken away."""

    def __init__(self, programs: Path, keeper: int, shared: Path) -> None:
        self._programs, self._keeper, self._shared = programs, keeper, shared
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        root, options = self._programs, ("-f", "--multithreaded", "-o", "nonempty")
        libraries = f"{root}/{LIBRARIES}:{root}/lib/{Path(LIBRARIES).name}"
        words = ["nsenter", f"--target={self._keeper}", *_NAMESPACES, f"{root}/usr/bin/bindfs", *options, "/mnt/source", str(self._shared)]
        process = subprocess.Popen(words, env=os.environ | {"LD_LIBRARY_PATH": libraries})
        mounts = Path(f"/proc/{self._keeper}/mounts")
        until(lambda: f" {self._shared} fuse" in mounts.read_text() or process.poll() is not None, 60, "a mirror")
        if process.poll() is not None:
            raise OSError("bindfs cannot mount here")
        return process

    def hold(self, hold: bool = True) -> None:
        """Let nothing be read or written, or go on."""
        self.process.send_signal(signal.SIGSTOP if hold else signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """Mount the folder again after `end`."""
        subprocess.run(["nsenter", f"--target={self._keeper}", *_NAMESPACES, "umount", "--lazy", str(self._shared)], check=True)
        self.process = self._start()


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    address6: str
    pid: int  # of the process that keeps the namespaces
    shared: Path  # the folder that all nodes see
    mirror: Mirror | None = None

    @property
    def prefix(self) -> tuple[str, ...]:
        """Return the words before a command that let it run on this node."""
        return ("nsenter", f"--target={self.pid}", *_NAMESPACES, "env", f"--chdir={ROOT}")  # of its own mounts

    def start(self, folder: Path, *arguments: object, **variables: str) -> Command:
        """Start `python -m ARGUMENTS` on this node, with its output in a folder that this machine can read."""
        words = [*self.prefix, sys.executable, "-m", *map(str, arguments)]
        clock = {"LD_PRELOAD": str(self.shared / "clock.so"), "CLOCK_FILE": _CLOCK} if (self.shared / "clock.so").exists() else {}
        return Command(folder, args=words, env=one_thread_environment() | clock | variables)

    def run(self, *words: str) -> str:
        done = subprocess.run([*self.prefix, *words], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout

    def list_processes(self) -> list[psutil.Process]:
        """Return the processes on this node, without the one that keeps it."""
        own, found = os.stat(f"/proc/{self.pid}/ns/net").st_ino, []
        keepers = (self.pid, self.mirror.process.pid if self.mirror else 0)
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                if process.pid not in keepers and os.stat(f"/proc/{process.pid}/ns/net").st_ino == own:
                    found.append(process)
        return found

    def list_files(self) -> list[str]:
        """Return the files below /tmp and /dev/shm, without the mounts of what is shared."""
        return self.run("find", "/tmp", "/dev/shm", "-xdev", "-type", "f").split()

    def cut(self, down: bool = True) -> None:
        """Take the node's cable out, or put it back."""
        self.run("ip", "link", "set", "eth0", "down" if down else "up")

    def fill(self, full: bool = True) -> None:
        """Leave no space in /tmp, or give it back."""
        used = self.run("df", "--output=used", "-k", "/tmp").split()[-1]
        self.run("mount", "-o", f"remount,size={used if full and used != '0' else 4 if full else 4 << 20}k", "/tmp")

    def set_clock(self, seconds: int) -> None:
        """Let the clock of this node's processes differ by so many seconds. Needs `make_clocks`."""
        with open(f"/proc/{self.pid}/root{_CLOCK}", "r+b") as file:
            file.write(struct.pack("q", seconds))


_CLOCK = "/mnt/clock"  # file with the seconds by which a node's clock differs


def make_clocks(shared: Path) -> None:
    """Let the nodes that share a folder have clocks that can be set, for the processes that are started from here on."""
    code = Path(__file__).with_name("node_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(shared / "clock.so"), str(code)], check=True, capture_output=True)


class Cluster:
    """Context manager of some nodes, which removes them with all their processes. Raise OSError where namespaces are not allowed.

    Args:
        count: Number of nodes.
        shared: A folder that all nodes see at its own path.
        mirrored: Give each node a `Mirror`. Raise NoPackageError if it cannot be had.
    """

    def __init__(self, count: int, shared: Path, mirrored: bool = False) -> None:
        self._count, self._shared = count, shared
        self._mirrored = unpack_packages(shared / "bindfs", "bindfs", program="usr/bin/bindfs") if mirrored else None
        self._keepers: list[subprocess.Popen[bytes]] = []
        self.nodes: list[Node] = []

    def __enter__(self) -> list[Node]:
        try:
            bridge = self._keep(["--net"], "ip link add name bridge type bridge && ip link set bridge up")
            (self._shared / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # nobody answers, so no address has a name in DNS
            subnet = os.getpid() % 250
            addresses = [f"10.214.{subnet}.{number + 1}" for number in range(self._count)]
            for number, address in enumerate(addresses):
                others = [f"{other} node{index}" for index, other in enumerate(addresses) if index != number]
                hosts = self._shared / f"hosts{number}"
                hosts.write_text("\n".join(["127.0.0.1 localhost", f"127.0.1.1 node{number}", *others, ""]))
                pid = self._keep(_NAMESPACES, self._prepare(number, hosts))
                mirror = Mirror(self._mirrored, pid, self._shared) if self._mirrored else None
                node = Node(f"node{number}", address, f"fd00:214:{subnet}::{number + 1}", pid, self._shared, mirror)
                port = ["name", f"port{number}", "netns", str(bridge)]
                node.run("ip", "link", "add", "name", "eth0", "type", "veth", "peer", *port)
                into = ["nsenter", f"--target={bridge}", "--net"]
                subprocess.run([*into, "ip", "link", "set", f"port{number}", "master", "bridge", "up"], check=True, capture_output=True)
                node.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
                node.run("ip", "addr", "add", f"{node.address6}/64", "dev", "eth0", "nodad")  # it would first look for other owners
                for device in ("eth0", "lo"):
                    node.run("ip", "link", "set", device, "up")
                self.nodes.append(node)
        except BaseException as error:
            self.__exit__()
            if isinstance(error, subprocess.SubprocessError | AssertionError):
                raise OSError(f"namespaces are not allowed here: {error}") from error
            raise
        return self.nodes

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            if node.mirror is not None:  # what waits for it can be killed only after its end
                node.mirror.end()
        end([process for node in self.nodes for process in node.list_processes()])
        for keeper in self._keepers:  # the kernel removes namespaces, cables, and mounts with the last process
            keeper.kill()
            keeper.wait()

    def _keep(self, namespaces: Sequence[str], script: str) -> int:
        """Return the process that keeps new namespaces, after a script has run in them."""
        ready = self._shared / f"ready{len(self._keepers)}"
        code = f"set -e; {script}; touch {shlex.quote(str(ready))}; exec sleep 86400"
        keeper = subprocess.Popen(["unshare", *namespaces, "sh", "-c", code], stderr=subprocess.PIPE)
        self._keepers.append(keeper)
        until(lambda: ready.exists() or keeper.poll() is not None, 60, "namespaces")
        if keeper.poll() is not None:
            raise OSError(keeper.stderr.read().decode().strip() if keeper.stderr else "unshare failed")
        return keeper.pid

    def _prepare(self, number: int, hosts: Path) -> str:
        """Return the script that gives a node its name and folders. What is shared may lie below /tmp, which is each node's own."""
        shared = [shlex.quote(str(path)) for path in dict.fromkeys((ROOT, Path(sys.prefix), self._shared))]
        save = [f"mkdir -p /mnt/{index}; mount --bind {path} /mnt/{index}" for index, path in enumerate(shared)]
        restore = [f"mkdir -p {path}; mount --bind /mnt/{index} {path}; umount /mnt/{index}" for index, path in enumerate(shared)]
        steps = [
            "mount --make-rprivate /",
            f"hostname node{number}",
            f"mount --bind {shlex.quote(str(hosts))} /etc/hosts",
            f"mount --bind {shlex.quote(str(self._shared / 'resolv.conf'))} /etc/resolv.conf",
            "mount -t tmpfs tmpfs /mnt",
            f"head -c 8 /dev/zero >{_CLOCK}",
            *save,
            "mount -t tmpfs tmpfs /tmp",
            "mount -t tmpfs tmpfs /dev/shm",
            *restore,
            f"mkdir /mnt/source; mount --bind {shlex.quote(str(self._shared))} /mnt/source",
        ]
        return "; ".join(steps)
