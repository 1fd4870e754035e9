"""The parts of a bucket that are exchanged separately, because parameters use different programs."""

from collections.abc import Mapping
from typing import NamedTuple

from thinwire.programs.program import Program, Programs, by_program

_SMALL = 1 << 18
"""The largest exact parameter, in bytes, that waits for the last bucket to share a collective."""


class BucketPart(NamedTuple):
    """Parameters of a bucket that one program averages together."""

    program: Program
    names: tuple[str, ...]
    exact: frozenset[str] = frozenset()
    """The names whose mean must be exact, although the program compresses the others."""
    deferred: bool = False
    """Whether the part waits for the parts of all other buckets of the step."""

    def sliced(self, nbytes: Mapping[str, int]) -> "list[BucketPart]":
        """Divide the part, between parameters, into slices of about the size that its program prefers.

        While one slice is on the wire, the next is encoded. Slices follow from the parameters' sizes alone,
        so they are the same on all ranks, and in a resumed run.

        Args:
            nbytes: The size of each parameter's gradient.
        """
        wanted, total = self.program.preferred_bytes, sum(nbytes[name] for name in self.names)
        count = 1 if wanted is None else max(1, round(total / wanted))
        if count == 1:
            return [self]
        members: dict[int, list[str]] = {}
        start = 0
        for name in self.names:
            members.setdefault(start * count // total, []).append(name)
            start += nbytes[name]
        return [
            self._replace(names=tuple(own), exact=self.exact.intersection(own)) for own in members.values()
        ]


def parts_of(names: tuple[str, ...], nbytes: Mapping[str, int], programs: Programs) -> list[BucketPart]:
    """Divide a group of parameters by program.

    The first program of the group that can carry exact parameters averages those that are exact although
    their program is lossy. If no program can, small ones wait for the end of the step, when one all-reduce
    averages those of all buckets.

    Args:
        names: Names of the parameters.
        nbytes: The size of each parameter's gradient.
        programs: The programs of the step.

    Returns:
        The parts, in the order in which they are exchanged.
    """
    chosen = by_program(names, programs.program, programs.exceptions)
    exact = frozenset(name for name in names if name in programs.exact)
    if not exact:
        return [BucketPart(program, own) for program, own in chosen]
    others = (name for name in names if name not in exact)
    lossy = by_program(others, programs.program, programs.exceptions)
    candidates = [program for program, _ in lossy] or [programs.program]
    carrier = next((program for program in candidates if program.carries_exact), None)
    if carrier is None:
        deferred = frozenset(name for name in exact if nbytes[name] <= _SMALL)
        return [
            BucketPart(program, kept, deferred=waiting)
            for program, own in chosen
            for waiting in (False, True)
            if (kept := tuple(name for name in own if (name in deferred) is waiting))
        ]
    members = {id(program): frozenset(own) for program, own in lossy}
    taken = members.get(id(carrier), frozenset()) | exact
    whole = BucketPart(carrier, tuple(name for name in names if name in taken), exact)
    return [whole, *(BucketPart(program, own) for program, own in lossy if program is not carrier)]
