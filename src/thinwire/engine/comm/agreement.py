"""Comparison of set-ups across ranks, through the store."""

import contextlib
import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from thinwire.engine.comm.rendezvous import StoreRendezvous
from thinwire.errors import MismatchError, ThinwireError
from thinwire.version import __version__

_ATTACH = "attach"
_IN_FULL = " in full"
_FAILED = "failed"
_SHOWN_DIFFERENCES = 5
_AS_WRITTEN = "as written: "


@dataclass(frozen=True)
class Described:
    """A value, such as a program, as two texts: one to compare and one to show.

    Attributes:
        full: The text with all options, which ranks compare.
        written: The text as the user wrote it, for errors.
    """

    full: str
    written: str


SetUp = Mapping[str, str | Described]
"""The values that must be equal on all ranks, by subject."""


def shown(values: Sequence[Described]) -> list[str]:
    """Return different values as the user wrote them, or in full if they would look the same."""
    written = [value.written for value in values]
    return written if len(set(written)) == len(values) else [value.full for value in values]


def set_up_of(
    parameters: Mapping[str, torch.Tensor], program: Described, **options: object
) -> dict[str, str | Described]:
    """Describe as text the values that must be equal on every rank.

    Args:
        parameters: The model's parameters by name.
        program: The program, in both texts.
        **options: Further values that must be equal.

    Returns:
        Texts by subject, as `agree_on` compares them.
    """
    return {
        "thinwire version": __version__,
        "torch version": str(torch.__version__),
        "program": program,
        **{
            f"option {name}": value if isinstance(value, Described) else str(value)
            for name, value in options.items()
        },
        **{
            f"parameter {name}": f"{tuple(parameter.shape)} {parameter.dtype}"
            for name, parameter in parameters.items()
        },
    }


def agree_on(set_up: SetUp, rendezvous: StoreRendezvous, limit: timedelta, topic: str = _ATTACH) -> None:
    """Compare set-ups; every rank must call it.

    Args:
        set_up: This rank's texts, by subject.
        rendezvous: The ranks to compare with.
        limit: How long to wait for them.
        topic: The name of the call, for errors.

    Raises:
        MismatchError: Set-ups differ, or a rank called `decline`. Raised on every rank, with the differences.
        WireError: A rank did not call it in time.
    """
    # Digests first: whole set-ups name every parameter, and only set-ups that differ must be shown.
    full = full_texts(set_up)
    digests = rendezvous.gather(topic, hashlib.sha256(json.dumps(full).encode()).hexdigest(), limit)
    if len(set(digests)) == 1:
        return
    text = json.dumps(texts_of(set_up))
    set_ups = [json.loads(story) for story in rendezvous.gather(topic + _IN_FULL, text, limit)]
    failures = [
        f"rank {rendezvous.ranks[rank]} raised: {each[_FAILED]}"
        for rank, each in enumerate(set_ups)
        if _FAILED in each
    ]
    if failures:
        raise MismatchError("; ".join(failures))
    raise MismatchError(
        f"ranks are set up differently: {differences_text(set_ups, rendezvous.text)}. Every rank needs"
        " the same program, options, model and versions"
    )


def full_texts(set_up: SetUp) -> dict[str, str]:
    """Return the texts that are compared, by subject."""
    return {key: value.full if isinstance(value, Described) else value for key, value in set_up.items()}


def texts_of(set_up: SetUp) -> dict[str, str]:
    """Return all texts of a set-up, those to show too, for `differences_text`."""
    written = {
        _AS_WRITTEN + key: value.written for key, value in set_up.items() if isinstance(value, Described)
    }
    return full_texts(set_up) | written


def differences_text(set_ups: Sequence[Mapping[str, str]], whose: Callable[[list[int]], str]) -> str:
    """Return the first differences between set-ups as text.

    Args:
        set_ups: Texts of `texts_of`, by rank.
        whose: A function that names ranks.

    Returns:
        The subjects that differ, with each value and the ranks that have it.
    """
    differences = _differences(set_ups, whose) or ["the order of parameters"]
    shown = "; ".join(differences[:_SHOWN_DIFFERENCES])
    more = len(differences) - _SHOWN_DIFFERENCES
    return shown + (f"; and {more} more" if more > 0 else "")


def decline(reason: str, rendezvous: StoreRendezvous, topic: str = _ATTACH) -> None:
    """Post a failure in place of `agree_on`, so that the other ranks raise at once instead of waiting."""
    text = json.dumps({_FAILED: reason})
    rendezvous.post(topic, text)
    rendezvous.post(topic + _IN_FULL, text)


@contextlib.contextmanager
def agreeing(
    rendezvous: StoreRendezvous, limit: timedelta, topic: str
) -> Iterator[dict[str, str | Described]]:
    """Run a block on all ranks, so that all of them raise if one does. Every rank must enter it.

    Args:
        rendezvous: The ranks.
        limit: How long to wait for them.
        topic: The operation's name, for error messages.

    Yields:
        A dict to put values in that must be equal on all ranks.

    Raises:
        MismatchError: Another rank raised, or the values differ. The rank that raised keeps its own error.
        WireError: A rank did not call it in time.
    """
    agreed: dict[str, str | Described] = {}
    try:
        yield agreed
    except Exception as error:
        known = isinstance(error, ThinwireError)
        decline(str(error) if known else f"{type(error).__name__}: {error}", rendezvous, topic)
        raise
    agree_on(agreed, rendezvous, limit, topic)


def _differences(set_ups: Sequence[Mapping[str, str]], whose: Callable[[list[int]], str]) -> list[str]:
    """Return one line per key that differs between ranks, with each value and its ranks."""
    differences = []
    for key in dict.fromkeys(key for set_up in set_ups for key in set_up):
        if key.startswith(_AS_WRITTEN):
            continue
        written: dict[str, str] = {}
        ranks_by_value: dict[str, list[int]] = defaultdict(list)
        for rank, set_up in enumerate(set_ups):
            value = set_up.get(key, "nothing")
            ranks_by_value[value].append(rank)
            written.setdefault(value, set_up.get(_AS_WRITTEN + key, value))
        if len(ranks_by_value) > 1:
            texts = shown([Described(*pair) for pair in written.items()])
            sides = [
                f"{text} on {whose(ranks)}"
                for text, ranks in zip(texts, ranks_by_value.values(), strict=True)
            ]
            differences.append(f"{key}: {', '.join(sides)}")
    return differences
