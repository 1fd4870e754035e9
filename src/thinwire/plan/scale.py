"""Plans over many world sizes and rates of links, for curves."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.plan.candidates import PLAIN_DDP, Candidate
from thinwire.plan.cost import Cost
from thinwire.plan.gaps import Known
from thinwire.plan.network import FRAMING, Network
from thinwire.plan.planner import Planner
from thinwire.plan.recommend import Limits, Recommendation, recommend

RATES = (1e8, 2.5e8, 5e8, 1e9, 2.5e9, 5e9, 1e10, 2.5e10)
"""Bits per second, 100 Mbit/s to 25 Gbit/s."""


@dataclass(frozen=True)
class Curve:
    """One candidate's costs over world sizes or rates."""

    candidate: Candidate
    costs: tuple[Cost, ...]


@dataclass(frozen=True)
class Scale:
    """Plans over world sizes at one link, and over rates at one world size.

    Attributes:
        network: The link that was given, with the largest world size.
        sizes: The world sizes.
        rates: The rates of links, headers included.
        by_size: A curve over world sizes for each candidate, plain DDP first.
        by_rate: A curve over rates for each candidate, at the largest world size.
        advice: The recommendation for each world size and rate, as `advice[size][rate]`.
    """

    network: Network
    sizes: tuple[int, ...]
    rates: tuple[float, ...]
    by_size: list[Curve]
    by_rate: list[Curve]
    advice: list[list[Recommendation]]


def scale(
    planner: Planner,
    candidates: Sequence[Candidate],
    networks: Sequence[Network],
    known: Known,
    limits: Limits,
) -> Scale:
    """Plan for every world size and rate.

    Args:
        planner: The planner.
        candidates: What to compare with plain DDP.
        networks: The network that was given, once for each world size.
        known: Measured loss gaps.
        limits: What recommendations must respect.
    """
    every = [PLAIN_DDP, *candidates]
    largest = networks[-1]
    by_size = [Curve(one, tuple(planner.cost(one, there) for there in networks)) for one in every]
    faster = [at_rate(largest, rate) for rate in RATES]
    by_rate = [Curve(one, tuple(planner.cost(one, there) for there in faster)) for one in every]
    advice = []
    for network in networks:
        there = [at_rate(network, rate) for rate in RATES]
        found = [recommend(planner.quick_rows(candidates, one, known), one, limits) for one in there]
        advice.append(found)
    return Scale(largest, tuple(one.ranks for one in networks), RATES, by_size, by_rate, advice)


def at_rate(network: Network, rate: float) -> Network:
    """Return the network with another rate of all links in both directions."""
    return replace(network, link=replace(network.link, up=FRAMING * rate, down=FRAMING * rate))
