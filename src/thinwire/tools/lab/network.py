"""A lab's network, and the shell commands that build it. This module runs no command.

Without groups, every host is connected to one switch by its own slow link:

    host 0 ─rate─┐
    host 1 ─rate─┤ switch
    host 2 ─rate─┘

With `groups`, each group has its own switch with fast links (`inside`) and one slow link to the other groups:

    host 0 ─inside─┐ group 0 ─rate─┐
    host 1 ─inside─┘               │ switch
    host 2 ─inside─┐ group 1 ─rate─┘
    host 3 ─inside─┘

A link is limited in each direction by the sender, where packets leave.
"""

import math
import re
from dataclasses import dataclass

from thinwire.errors import OptionError
from thinwire.plan import units
from thinwire.plan.units import show_rate

INTERFACE = "eth0"
MOST_HOSTS = 64
_SLOWEST, _FASTEST = 10**5, 10**11


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a link, as configured by `tc`.

    Attributes:
        rate: Bits per second. None for an unlimited link.
        delay: Milliseconds by which every packet is delayed.
        loss: Per cent of packets that are lost.
    """

    rate: int | None = None
    delay: float = 0.0
    loss: float = 0.0

    def commands(self, device: str) -> list[str]:
        """Return the shell commands that limit the traffic leaving through `device`.

        The token bucket holds 2 ms of traffic, but at least 8 KB. `gso_max_size` keeps packets smaller than
        it.
        """
        commands = []
        if self.delay or self.loss:
            commands.append(
                f"tc qdisc add dev {device} root handle 1: netem limit 100000"
                f" delay {self.delay:g}ms loss {self.loss:g}%"
            )
        if self.rate is not None:
            # With segmentation offload the kernel passes packets of 64 KB. A bucket that does not hold them
            # makes tbf split them, and transfers reach 0.90 of the rate (benchmarks/bandwidth.py). A bucket
            # that holds them lets a sender exceed the rate after a pause, by 52 ms of traffic at 10mbit. So
            # the bucket stays small and packets are made to fit.
            burst = max(8192, self.rate // 8 // 500)
            above = "parent 1:" if commands else "root"
            commands.append(f"ip link set {device} gso_max_size {min(65536, burst * 3 // 4)}")
            commands.append(
                f"tc qdisc add dev {device} {above} tbf rate {self.rate}bit burst {burst} latency 100ms"
            )
        return commands


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts, and the links between them.

    Attributes:
        links: The slow links, one per host, or one per group if there are groups.
        groups: The number of hosts in each group. Empty without groups.
        inside: The link of each host within its group.
    """

    links: tuple[Link, ...]
    groups: tuple[int, ...] = ()
    inside: Link = Link()

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return sum(self.groups) if self.groups else len(self.links)

    @property
    def rate(self) -> int | None:
        """Bits per second of the slowest link. None if all links are unlimited."""
        return min((link.rate for link in self.links if link.rate is not None), default=None)

    def __str__(self) -> str:
        rates = ", ".join(dict.fromkeys(show_rate(link.rate) for link in self.links))
        slow = self.links[0]
        extra = f", {slow.delay:g} ms" * bool(slow.delay) + f", {slow.loss:g} % loss" * bool(slow.loss)
        if not self.groups:
            return f"{self.hosts} host{'s' * (self.hosts > 1)} at {rates}{extra}"
        sizes = "+".join(map(str, self.groups))
        return f"{sizes} hosts, {show_rate(self.inside.rate)} within a group, {rates}{extra} between"

    def address(self, host: int) -> str:
        """Return the IP address of a host."""
        return f"10.77.0.{host + 1}"

    def script(self) -> str:
        """Return a shell script that builds the network and keeps it until its stdin is closed.

        It prints a line `host PID` for each host, then `ready`.
        """
        names = "\\n".join(f"{self.address(host)} host{host}" for host in range(self.hosts))
        lines = [_PRELUDE, f"names '{names}' || :", "bridge switch"]
        lines += [
            line for group, link in enumerate(self.links) if self.groups for line in _uplink(group, link)
        ]
        above = [f"group{group}" for group, size in enumerate(self.groups) for _ in range(size)]
        for host in range(self.hosts):
            link = self.inside if self.groups else self.links[host]
            inner = [f"ip addr add {self.address(host)}/24 dev {INTERFACE}", *link.commands(INTERFACE)]
            lines.append(f"host {host} {above[host] if above else 'switch'} '{'; '.join(inner)}'")
        return "\n".join([*lines, "echo ready", "while read -r line; do :; done", ""])


_PRELUDE = f"""set -eu
mount -t proc proc /proc
names() {{ # only the lab's mount namespace sees this file, and it is on no disk
    mount -t tmpfs tmpfs /mnt && cp /etc/hosts /mnt/hosts && printf "$1\\n" >> /mnt/hosts &&
        mount --bind /mnt/hosts /etc/hosts && umount -l /mnt
}}
bridge() {{ ip link add "$1" type bridge; ip link set "$1" up; }}
host() {{
    unshare --net sleep infinity &
    until [ "$(readlink /proc/$!/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do :; done
    ip link add "port$1" type veth peer name {INTERFACE} netns $!
    ip link set "port$1" master "$2" up
    nsenter --target $! --net sh -eu -c "ip link set lo up; ip link set {INTERFACE} up; $3"
    echo "host $!"
}}"""


def _uplink(group: int, link: Link) -> list[str]:
    name = f"uplink{group}"
    return [
        f"bridge group{group}",
        f"ip link add {name} type veth peer name core{group}",
        f"ip link set {name} master group{group} up",
        f"ip link set core{group} master switch up",
        *link.commands(name),
    ]


def plan(
    *,
    hosts: int | None = None,
    rate: str = "unlimited",
    groups: str | None = None,
    inside: str = "unlimited",
    delay: float = 0.0,
    loss: float = 0.0,
) -> Network:
    """Make a network from command-line options.

    Args:
        hosts: The number of hosts. Not needed with `groups`.
        rate: One rate for all slow links, or one for each, separated by commas.
        groups: `2x3` for two groups of three hosts each.
        inside: The rate of each host within its group.
        delay: Milliseconds that each slow link adds.
        loss: Per cent of packets that each slow link loses.

    Returns:
        The network, for `thinwire.tools.lab.namespaces.Lab`.

    Raises:
        OptionError: A value does not parse, is out of range or contradicts another one.

    >>> print(plan(hosts=2, rate="100mbit"))
    2 hosts at 100mbit
    >>> print(plan(groups="2x2", rate="10mbit,50mbit", inside="1gbit"))
    2+2 hosts, 1gbit within a group, 10mbit, 50mbit between
    """
    sizes = _groups(groups, hosts)
    links = len(sizes) or _count(hosts)
    if not 0 <= delay < 60_000:
        raise OptionError(f"delay={delay:g} must be from 0 up to a minute: it is in milliseconds")
    if not 0 <= loss < 100:
        raise OptionError(f"loss={loss:g} must be from 0 up to below 100: it is in per cent")
    rates = [parse_rate(part) for part in rate.split(",")]
    if len(rates) not in (1, links):
        what = "group" if sizes else "host"
        raise OptionError(f"rate={rate!r} has {len(rates)} rates for {links} {what}s: pass one, or one each")
    slow = [Link(rate=limit, delay=delay, loss=loss) for limit in rates]
    return Network(
        links=tuple(slow * links if len(slow) == 1 else slow),
        groups=sizes,
        inside=Link(rate=parse_rate(inside)),
    )


def parse_rate(text: str) -> int | None:
    """Parse a rate.

    Returns:
        Bits per second, or None for an unlimited link.

    Raises:
        OptionError: `text` does not parse, or the rate cannot be emulated.

    >>> parse_rate("100mbit"), parse_rate("2.5 Gbit/s"), parse_rate("unlimited")
    (100000000, 2500000000, None)
    """
    rate = units.parse_rate(text)
    if math.isinf(rate):
        return None
    if not _SLOWEST <= rate <= _FASTEST:
        raise OptionError(f"rate={text!r} cannot be emulated: choose a rate from 100kbit to 100gbit")
    return round(rate)


def _groups(groups: str | None, hosts: int | None) -> tuple[int, ...]:
    if groups is None:
        return ()
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", groups)
    if not match:
        raise OptionError(f"groups={groups!r} does not parse: 2x3 makes two groups of three hosts each")
    count, size = int(match[1]), int(match[2])
    if count * size > MOST_HOSTS:
        raise OptionError(f"groups={groups!r} makes {count * size} hosts: at most {MOST_HOSTS} fit in a lab")
    sizes = (size,) * count
    if hosts is not None and hosts != sum(sizes):
        raise OptionError(
            f"hosts={hosts} does not fit groups={groups!r}, which makes {sum(sizes)}: leave it out"
        )
    return sizes


def _count(hosts: int | None) -> int:
    hosts = 2 if hosts is None else hosts
    if not 1 <= hosts <= MOST_HOSTS:
        raise OptionError(f"hosts={hosts} must be from 1 to {MOST_HOSTS}: each is one emulated machine")
    return hosts
