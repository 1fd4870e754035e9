"""The network interfaces of this host, and the one that Gloo uses."""

import fcntl
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_CLASS = Path("/sys/class/net")
_ROUTES = Path("/proc/net/route")


@dataclass(frozen=True)
class Interface:
    """A network interface that is up.

    Attributes:
        name: Its name, such as `eth0`.
        address: Its IPv4 address, or None.
        speed: Mbit/s as reported by its driver, or None.
    """

    name: str
    address: str | None
    speed: int | None

    def __str__(self) -> str:
        rate = "speed unknown" if self.speed is None else f"{self.speed} Mbit/s"
        return f"{self.name}, {self.address or 'no IPv4 address'}, {rate}"


def interfaces() -> list[Interface]:
    """Return the interfaces that are up, loopback last."""
    names = sorted(path.name for path in _CLASS.iterdir()) if _CLASS.exists() else []
    up = [name for name in names if _read(name, "operstate") in ("up", "unknown")]
    found = [Interface(name, _address(name), _speed(name)) for name in up]
    return sorted(
        (interface for interface in found if interface.address),
        key=lambda interface: (interface.name == "lo", interface.name),
    )


def default_route() -> str | None:
    """Return the interface of the default route, or None if there is none."""
    lines = [line.split() for line in _ROUTES.read_text().splitlines()[1:]] if _ROUTES.exists() else []
    return next((words[0] for words in lines if words[1] == "00000000"), None)


def gloo_interface(up: list[Interface]) -> tuple[Interface | None, str]:
    """Return the interface that Gloo will use, and why.

    Gloo takes the interface that the environment names, or else the one with the address of the host's name.
    If no interface has that address, it takes loopback.

    Args:
        up: The interfaces that are up.
    """
    named = os.environ.get(VARIABLE)
    if named:
        first = named.split(",")[0]
        return next(
            (interface for interface in up if interface.name == first), None
        ), f"by {VARIABLE}={named}"
    try:
        own = {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    except OSError:
        own = set()
    found = next((interface for interface in up if interface.address in own), None)
    if found is not None:
        return found, f"by the address of the host name {socket.gethostname()}"
    if any(address.startswith("127.") for address in own) or not own:
        loopback = next((interface for interface in up if interface.name == "lo"), None)
        return loopback, f"as the host name {socket.gethostname()} has no other address"
    return None, f"by the host name {socket.gethostname()}, whose address no interface has"


def _read(name: str, what: str) -> str:
    try:
        return (_CLASS / name / what).read_text().strip()
    except OSError:  # a virtual interface has no speed
        return ""


def _speed(name: str) -> int | None:
    text = _read(name, "speed")
    return int(text) if text.isdigit() and int(text) > 0 else None


def _address(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            packed = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError:
            return None
        return socket.inet_ntoa(packed[20:24])
