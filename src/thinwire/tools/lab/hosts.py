"""Hosts on which a command can be started. They are emulated, or plain processes over loopback."""

import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol


class Hosts(Protocol):
    """A set of machines, real or emulated."""

    @property
    def count(self) -> int:
        """The number of hosts."""

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on one host, in its own session.

        Args:
            host: The host's number.
            command: The program and its arguments.
            **options: `stdout` and `stderr`, as for `subprocess.Popen`.

        Returns:
            The running process.
        """

    def environment(self, host: int) -> Mapping[str, str]:
        """Return the variables by which torch.distributed and torchrun on `host` find the other hosts.

        Args:
            host: The host's number.

        Returns:
            Values by name.
        """

    def bytes_sent(self) -> list[int] | None:
        """Return the bytes that each host has sent so far, as counted by its network device.

        Returns:
            One count for each host, or None if all hosts share a device.
        """

    def bytes_between(self) -> list[int] | None:
        """Return the bytes that each group of hosts has sent to other groups so far.

        Returns:
            One count for each group, or None without groups.
        """


class Loopback:
    """Plain processes on this machine that communicate over loopback, without a limit of the rate."""

    def __init__(self, count: int) -> None:
        self.count = count
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._port = server.getsockname()[1]

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a plain process."""
        return launch(command, self.environment(host), **options)

    def environment(self, host: int) -> Mapping[str, str]:
        """Return the variables of one rank. All ranks are at 127.0.0.1."""
        return rendezvous(host, self.count, "127.0.0.1", self._port, "lo")

    def bytes_sent(self) -> None:
        """Return None, because all hosts share one device."""

    def bytes_between(self) -> None:
        """Return None, because there are no groups."""


def rendezvous(host: int, hosts: int, address: str, port: int, interface: str) -> dict[str, str]:
    """Return the environment that makes `python train.py` one rank, and `torchrun` one node, per host.

    torchrun reads options from `PET_` variables unless its command line sets them.

    Args:
        host: The host's number.
        hosts: The number of hosts.
        address: The address of host 0.
        port: The port on which host 0 listens.
        interface: The network device that Gloo and NCCL must use.
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
    """Start a process in its own session, so that Ctrl-C reaches only the process that supervises it."""
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
