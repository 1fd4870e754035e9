"""What must be equal on all ranks, and how they find out that it is not."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta

import torch

from thinwire.errors import MismatchError
from thinwire.programs.program import describe
from thinwire.version import __version__
from thinwire.wire.agree import Meeting, ranks_text

_ATTACH = "attach"
_IN_FULL = " in full"
_REFUSED = "refused"
_SHOWN_DIFFERENCES = 5


def set_up_of(
    parameters: Mapping[str, torch.nn.Parameter], program: object, **options: object
) -> dict[str, str]:
    """All that must be equal on every rank, as text."""
    return {
        "thinwire version": __version__,
        "torch version": str(torch.__version__),
        "program": describe(program),
        **{f"option {name}": str(value) for name, value in options.items()},
        **{
            f"parameter {name}": f"{tuple(parameter.shape)} {parameter.dtype}"
            for name, parameter in parameters.items()
        },
    }


def agree_on(set_up: dict[str, str], meeting: Meeting, limit: timedelta, topic: str = _ATTACH) -> None:
    """Raise MismatchError on every rank, naming what differs where, unless all ranks say the same."""
    text = json.dumps(set_up)
    digests = meeting.gather(topic, hashlib.sha256(text.encode()).hexdigest(), limit)
    if len(set(digests)) == 1:
        return
    set_ups = [json.loads(story) for story in meeting.gather(topic + _IN_FULL, text, limit)]
    refusals = [
        f"rank {rank} refused: {each[_REFUSED]}" for rank, each in enumerate(set_ups) if _REFUSED in each
    ]
    if refusals:
        raise MismatchError("; ".join(refusals))
    differences = _differences(set_ups) or ["the order of parameters"]
    shown = "; ".join(differences[:_SHOWN_DIFFERENCES])
    more = len(differences) - _SHOWN_DIFFERENCES
    raise MismatchError(
        f"ranks are set up differently: {shown}"
        + (f"; and {more} more" if more > 0 else "")
        + ". Give every rank the same program, options, model and versions"
    )


def decline(reason: str, meeting: Meeting, topic: str = _ATTACH) -> None:
    """Instead of agreeing: leave word, so that the other ranks raise at once rather than wait."""
    text = json.dumps({_REFUSED: reason})
    meeting.post(topic, text)
    meeting.post(topic + _IN_FULL, text)


def _differences(set_ups: list[dict[str, str]]) -> list[str]:
    """One line per key that is not the same on all ranks: which value on which ranks."""
    differences = []
    for key in dict.fromkeys(key for set_up in set_ups for key in set_up):
        ranks_by_value: dict[str, list[int]] = defaultdict(list)
        for rank, set_up in enumerate(set_ups):
            ranks_by_value[set_up.get(key, "nothing")].append(rank)
        if len(ranks_by_value) > 1:
            sides = [f"{value} on {ranks_text(ranks)}" for value, ranks in ranks_by_value.items()]
            differences.append(f"{key}: {', '.join(sides)}")
    return differences
