"""Hosts that a command can be started on: emulated ones, or plain processes over loopback."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol


class Hosts(Protocol):
    """Some machines, or what stands for them."""

    @property
    def count(self) -> int:
        """How many hosts there are."""

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on one host, in a session of its own."""

    def environment(self, host: int) -> Mapping[str, str]:
        """What torch.distributed and torchrun need to find each other."""

    def bytes_sent(self) -> list[int] | None:
        """What each host has put on the network so far, read off its device; None: cannot be told apart."""


class Loopback:
    """Ranks side by side on this machine, with nothing between them."""

    def __init__(self, count: int) -> None:
        self.count = count
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a plain process."""
        return launch(command, self.environment(host), **options)

    def environment(self, host: int) -> Mapping[str, str]:
        """Everybody is at 127.0.0.1."""
        return rendezvous(host, self.count, "127.0.0.1", self._port, "lo")

    def bytes_sent(self) -> None:
        """All hosts share one device."""


def rendezvous(host: int, hosts: int, address: str, port: int, interface: str) -> dict[str, str]:
    """The environment that makes `python train.py` one rank per host, and `torchrun` one node per host.

    torchrun reads its own options from `PET_` variables where its command line does not give them.
    """
    return {
        "RANK": str(host),
        "WORLD_SIZE": str(hosts),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "PET_NNODES": str(hosts),
        "PET_NODE_RANK": str(host),
        "PET_MASTER_ADDR": address,
        "PET_MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // hosts))),
    }


def launch(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdout: int | IO[str] | None = None,
    stderr: int | IO[str] | None = None,
) -> subprocess.Popen[str]:
    """Start a process in a session of its own, so that Ctrl-C reaches only the one who minds them all."""
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )
