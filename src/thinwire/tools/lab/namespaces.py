"""The lab, a network of namespaces that lives exactly as long as the process that opened it.

A shell is the first process of a new process namespace. It builds the network and then reads its stdin, a
pipe that the opener holds. The pipe closes when the opener ends by return, exception, Ctrl-C or kill -9. The
shell then ends, and the kernel kills every process of that namespace and removes its network. Nothing in a
lab is visible outside of it. Labs therefore cannot collide, and need no clean-up.

Named namespaces (`ip netns add`) would outlive a killed owner, and need a clean-up that itself can be killed.
Here hosts are anonymous namespaces, each kept by a sleeping process and entered by `nsenter`, so that a lab
needs no `/run/netns`, no root, and no name that two labs could both use.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from thinwire.errors import LabError, UnavailableError
from thinwire.tools.lab.hosts import launch, rendezvous
from thinwire.tools.lab.network import INTERFACE, Network

MARK = "thinwire-lab"
_PORT = 29500
_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
}
# --fork: `unshare` itself stays outside of the process namespace, and its child becomes process 1 in it.
# --kill-child: if `unshare` is killed, process 1 is too, and the kernel ends all others with it.
_SPACES = ["--net", "--mount", "--pid", "--fork", "--kill-child"]


class Lab:
    """Emulated hosts that exist within a `with` block.

    Args:
        network: The hosts and their links, from `thinwire.tools.lab.network.plan`.

    Raises:
        UnavailableError: This machine cannot open network namespaces.
        LabError: The network could not be built.

    Example::

        with Lab(plan(hosts=2, rate="100mbit")) as lab:
            lab.start(0, ["python", "train.py"]).wait()
            print(lab.bytes_sent())
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.count = network.hosts
        self._as_user: list[str] = []
        self._keeper: subprocess.Popen[str] | None = None
        self._inner_pids: list[str] = []
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Lab":
        self._as_user, self._inner_pids = way_in(), []
        command = ["unshare", *self._as_user, *_SPACES, "sh", "-c", self.network.script(), MARK, _identity()]
        self._keeper = subprocess.Popen(
            command,
            env={**os.environ, "PATH": _PATH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self._wait_until_ready(self._keeper)
        except BaseException:
            self.close()
            raise
        return self

    def _wait_until_ready(self, keeper: subprocess.Popen[str]) -> None:
        assert keeper.stdout is not None
        assert keeper.stderr is not None
        for line in keeper.stdout:
            if line.strip() == "ready":
                return
            self._inner_pids.append(line.removeprefix("host").strip())
        raise _build_error(keeper.stderr.read().strip(), self.network)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process in the lab and remove its network. Return when all of them have ended."""
        keeper, self._keeper = self._keeper, None
        if keeper is None:
            return
        for pipe in (keeper.stdin, keeper.stdout, keeper.stderr):
            if pipe is not None:
                pipe.close()
        try:
            keeper.wait(10)
        except subprocess.TimeoutExpired:
            keeper.kill()  # --kill-child then ends the whole namespace
            keeper.wait()
        for process in self._started:
            process.wait()

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on one host. See `Hosts.start`."""
        process = launch(self._entering(host, command), self.environment(host), **options)
        self._started.append(process)
        return process

    def environment(self, host: int) -> Mapping[str, str]:
        """Return the variables of one host. The rendezvous is on host 0."""
        # Every lab has its own network, so the port cannot be in use.
        own = rendezvous(host, self.count, self.network.address(0), _PORT, INTERFACE)
        return {**own, "THINWIRE_LAB": str(self.network)}

    def bytes_sent(self) -> list[int]:
        """Return the bytes that each host has sent so far, as counted at its port of the switch.

        Raises:
            LabError: The lab is closed, or another process ended it.
        """
        try:
            devices = read_devices(f"/proc/{self._open().pid}/net/dev")
            return [devices[f"port{host}"].received for host in range(self.count)]
        except (OSError, KeyError) as error:
            raise LabError(
                "the lab's network is gone while the lab is open: another process ended it; open a new lab"
            ) from error

    def bytes_between(self) -> list[int] | None:
        """Return the bytes that each group has sent to other groups so far, as counted at its slow link."""
        if not self.network.groups:
            return None
        devices = read_devices(f"/proc/{self._open().pid}/net/dev")
        return [devices[f"uplink{group}"].sent for group in range(len(self.network.groups))]

    def network_of(self, host: int) -> Path:
        """Return the file of a host's network namespace, which a process of root's can enter with `setns`."""
        return Path(f"/proc/{self._open().pid}/root/proc/{self._inner_pids[host]}/ns/net")

    def cut(self, host: int) -> None:
        """Cut a host off the network, as if its cable were pulled: connections stay open, silently."""
        self._set_link(host, "down")

    def mend(self, host: int) -> None:
        """Connect a host that was cut off."""
        self._set_link(host, "up")

    def _set_link(self, host: int, state: str) -> None:
        keeper, own_user = (
            str(self._open().pid),
            ["--user", "--preserve-credentials"] if self._as_user else [],
        )
        inside = ["nsenter", "--target", keeper, *own_user, "--net", "--"]
        subprocess.run(
            [*inside, "ip", "link", "set", f"port{host}", state],
            check=True,
            env={**os.environ, "PATH": _PATH},
        )

    def _entering(self, host: int, command: Sequence[str]) -> list[str]:
        """Return a command that enters the lab, then the host, whose process id is valid only in the lab."""
        # Two steps: the process id of a host's keeper is valid only in the lab's process namespace.
        keeper = self._open().pid
        own_user = ["--user", "--preserve-credentials"] if self._as_user else []
        lab = [
            "nsenter",
            "--target",
            str(keeper),
            *own_user,
            "--mount",
            # `unshare` runs outside of the process namespace that it made. Its children run inside.
            f"--pid=/proc/{keeper}/ns/pid_for_children",
        ]
        here = ["env", "--chdir", os.getcwd()]  # nsenter --mount changes the working directory to /
        return [*lab, "nsenter", "--target", self._inner_pids[host], "--net", "--", *here, *command]

    def _open(self) -> subprocess.Popen[str]:
        if self._keeper is None:
            raise LabError("this lab is closed: use it within `with Lab(network) as lab:`")
        return self._keeper


class Device:
    """The byte counters of one network device."""

    def __init__(self, line: str) -> None:
        counters = [int(word) for word in line.split()]
        self.received, self.sent = counters[0], counters[8]


def read_devices(path: str = "/proc/net/dev") -> dict[str, Device]:
    """Read the counters of every network device in the network namespace that `path` belongs to."""
    lines = [line.split(":", 1) for line in Path(path).read_text().splitlines() if ":" in line]
    return {name.strip(): Device(counters) for name, counters in lines}


def way_in() -> list[str]:
    """Return the options of `unshare` with which this machine can open a lab.

    Raises:
        UnavailableError: A tool is not installed, or the system denies network namespaces.
    """
    absent = [tool for tool in _PACKAGES if not shutil.which(tool, path=_PATH)]
    if absent:
        packages = " ".join(dict.fromkeys(_PACKAGES[tool] for tool in absent))
        raise UnavailableError(
            f"the lab needs the command {absent[0]!r}, which is not installed: apt-get install {packages}"
        )
    mapped = ["--user", "--map-root-user"]
    # Root in a container may still be denied, and then a user namespace may work.
    for way in [[], mapped] if os.geteuid() == 0 else [mapped]:
        attempt = try_inside(way, "mount -t proc proc /proc")
        if attempt.returncode == 0:
            return way
    raise UnavailableError(
        f"the lab needs network namespaces, and this system denies them ({attempt.stderr.strip()}): run as"
        " root, or allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, or"
        " kernel.apparmor_restrict_unprivileged_userns=0; in Docker: --privileged)"
    )


def try_inside(way: list[str], script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in temporary namespaces.

    Args:
        way: The options of `unshare`, from `way_in`.
        script: The commands.

    Returns:
        The finished process, with its output. A failure is not raised.
    """
    return subprocess.run(
        ["unshare", *way, *_SPACES, "sh", "-c", script],
        env={**os.environ, "PATH": _PATH},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def clean() -> int:
    """End the remains of labs whose owner has ended, and return their number.

    The kernel normally ends a lab with its owner. A lab remains only if its first process was frozen at that
    moment. Labs of containers, and labs within labs, are left alone because their owners are not visible
    from here.
    """
    removed = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode().split("\0")
            if MARK not in words or words[0] != "unshare":
                continue
            owner, _, where = words[words.index(MARK) + 1].partition(" in ")
            if where == _pid_namespace() and _began(int(owner.split("@")[0])) != owner:
                os.kill(int(folder.name), signal.SIGKILL)
                removed += 1
        except (OSError, ValueError, IndexError):
            continue  # it has ended in the meantime, or it is not a lab
    return removed


def _identity() -> str:
    """Return an identifier of this process that is unique among all processes of this machine."""
    return f"{_began(os.getpid())} in {_pid_namespace()}"


def _began(pid: int) -> str:
    """Return a process id with its start time, because the kernel may reuse an id."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return f"{pid}@{after_name[19]}"


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _build_error(said: str, network: Network) -> LabError | UnavailableError:
    """Return the error for a network that could not be built."""
    if any(link.delay or link.loss for link in network.links) and "qdisc" in said:
        return UnavailableError(
            f"this kernel cannot emulate delay or loss (netem: {said}): leave --delay and --loss out, or load"
            " the module sch_netem"
        )
    said = said or "no error message"
    return LabError(f"the network could not be built ({said}): run `thinwire doctor` to see what is missing")
