"""Rates and networks in words, and the commands that build them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire import OptionError
from thinwire.plan.units import show_rate
from thinwire.tools.cli.doctor import network
from thinwire.tools.lab.interfaces import VARIABLE, Interface, default_route, gloo_interface, interfaces
from thinwire.tools.lab.network import Link, parse_rate, plan


@given(st.integers(min_value=10**5, max_value=10**11))
def test_a_shown_rate_reads_back_within_rounding(rate: int) -> None:
    again = parse_rate(show_rate(rate))
    assert again is not None
    assert abs(again - rate) <= 1e-5 * rate


@pytest.mark.parametrize(
    "text", ["", "fast", "100", "100mbps", "-1mbit", "1e3mbit", "mbit", "1kbit", "900gbit"]
)
def test_a_rate_that_makes_no_sense_is_an_error_with_its_value(text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"rate={text!r}")):
        parse_rate(text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hosts": 0}, "hosts=0 must be from 1"),
        ({"hosts": 65}, "hosts=65"),
        ({"groups": "2y3"}, "groups='2y3' does not parse"),
        ({"groups": "0x2"}, "groups='0x2' does not parse"),
        ({"groups": "9x9"}, "81 hosts: at most 64"),
        ({"groups": "2x2", "hosts": 3}, "hosts=3 does not fit groups='2x2', which makes 4"),
        ({"hosts": 3, "rate": "1mbit,2mbit"}, "2 rates for 3 hosts"),
        ({"groups": "3x1", "rate": "1mbit,2mbit"}, "2 rates for 3 groups"),
        ({"delay": -1}, "delay=-1 must be from 0"),
        ({"delay": float("nan")}, "delay=nan must be from 0"),
        ({"groups": "99999999999x1"}, "hosts: at most 64"),
        ({"loss": 100}, "loss=100 must be"),
    ],
)
def test_a_network_that_makes_no_sense_is_an_error(options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=re.escape(message)):
        plan(**options)  # type: ignore[arg-type]


def test_every_host_has_its_own_rate_on_its_own_link() -> None:
    network = plan(hosts=2, rate="10mbit,20mbit")
    first, second = (line for line in network.script().splitlines() if line.startswith("host "))
    assert "rate 10000000bit" in first
    assert "10.77.0.1/24" in first
    assert "rate 20000000bit" in second
    assert "10.77.0.2/24" in second
    assert network.rate == 10_000_000


def test_groups_have_fast_links_inside_and_a_slow_one_between() -> None:
    network = plan(groups="2x3", rate="10mbit", inside="1gbit")
    script = network.script()
    hosts = [line for line in script.splitlines() if line.startswith("host ")]
    assert network.hosts == len(hosts) == 6
    assert all("rate 1000000000bit" in line for line in hosts)
    assert [line.split()[2] for line in hosts] == ["group0"] * 3 + ["group1"] * 3
    assert len(re.findall(r"dev uplink\d root tbf rate 10000000bit", script)) == 2


def test_an_unlimited_link_is_not_shaped() -> None:
    assert Link().commands("eth0") == []


def test_delay_and_loss_stand_before_the_rate() -> None:
    netem, _, tbf = Link(rate=10**6, delay=20, loss=0.5).commands("eth0")
    assert "root handle 1: netem" in netem
    assert "delay 20ms loss 0.5%" in netem
    assert "parent 1: tbf" in tbf


ETHERNET, WIRELESS, LOOPBACK = (
    Interface("eth0", "10.0.0.5", 1000),
    Interface("wlan0", "192.168.0.5", None),
    Interface("lo", "127.0.0.1", None),
)


@pytest.mark.parametrize(
    ("up", "route", "named", "ok", "said"),
    [
        ([ETHERNET, LOOPBACK], "eth0", "eth0", True, "Gloo uses eth0, 10.0.0.5, 1000 Mbit/s by"),
        ([ETHERNET, WIRELESS, LOOPBACK], "eth0", "wlan0", False, "but the default route is eth0"),
        ([ETHERNET, WIRELESS, LOOPBACK], "eth0", "eth0", True, "eth0"),
        ([ETHERNET, LOOPBACK], "eth0", "lo", False, "which other hosts cannot reach"),
        ([ETHERNET, LOOPBACK], "eth0", "eth7", False, "Gloo finds no interface by"),
        ([LOOPBACK], None, "lo", True, "speed unknown"),
    ],
)
def test_doctor_warns_where_gloo_may_use_the_wrong_interface(
    up: list[Interface], route: str | None, named: str, ok: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, named)
    finding = network(up, route)
    assert finding.ok is ok
    assert said in finding.detail
    assert finding.ok or f"export {VARIABLE}=" in finding.remedy


def test_the_host_name_decides_where_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    address = [(2, 1, 6, "", ("10.0.0.5", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: address)
    both = [ETHERNET, WIRELESS, LOOPBACK]
    assert gloo_interface(both)[0] is ETHERNET
    assert "wlan0 is up too" in network(both, "eth0").detail
    address[0] = (2, 1, 6, "", ("127.0.1.1", 0))
    assert gloo_interface(both)[0] is LOOPBACK


def test_this_host_has_a_loopback_interface() -> None:
    assert any(one.name == "lo" and one.address == "127.0.0.1" for one in interfaces())
    assert default_route() is None or default_route() in {one.name for one in interfaces()}
