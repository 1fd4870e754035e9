"""Different programs for different parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from thinwire.programs.allreduce import Exact
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, require_program
from thinwire.programs.rules import Rules, check_used, checked_rules, rule_of
from thinwire.wire.ops import Steps
from thinwire.wire.pack import pack, unpack


@dataclass(frozen=True)
class Partition:
    """Gives every parameter to the program of the first rule that fits it, within one program.

    `attach(ddp, program, rules=...)` does the same from outside, and lets the parts travel side by side; this
    is for use within other programs, such as `AcrossNodes`.

    Args:
        rules: Pairs of a pattern and a program. In patterns `*` stands for anything and `?` for one
            character: "*.bias", "embed.*". Or a `Size` in the place of the pattern.
        default: The program of parameters that no pattern fits.

    Each program sees its parameters of a bucket as a bucket of their own. `attach` refuses patterns that fit
    no parameter of the model, or that earlier ones leave nothing to.

    Example::

        rules = [("*norm*", thinwire.Exact()), ("*.bias", thinwire.Exact())]
        wire = thinwire.attach(ddp, thinwire.Partition(rules, default=thinwire.Int4()))
    """

    rules: Rules
    default: Program = field(default_factory=Exact)

    spares_vectors: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", checked_rules(self.rules))
        require_program(self.default, "default")

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Refuse rules that no parameter follows: most likely a name is misspelt."""
        check_used(self.rules, shapes)

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """One program after another, each on its own parameters of the bucket."""
        members: dict[int, list[int]] = {}
        for place, (name, shape) in enumerate(zip(bucket.names, bucket.shapes, strict=True)):
            members.setdefault(rule_of(self.rules, name, shape), []).append(place)
        if len(members) == 1:
            (number,) = members
            return (yield from self._program(number)(bucket, memory))
        views, tracked = unpack(bucket.buffer, bucket.shapes), bucket.track_error
        error = torch.empty_like(bucket.buffer)
        errors = unpack(error, bucket.shapes)
        for number, places in sorted(members.items()):
            shapes = tuple(bucket.shapes[place] for place in places)
            part = replace(
                bucket,
                buffer=pack([views[place] for place in places]),
                names=tuple(bucket.names[place] for place in places),
                shapes=shapes,
            )
            outcome = yield from self._program(number)(part, memory)
            for place, mean in zip(places, unpack(outcome.mean, shapes), strict=True):
                views[place].copy_(mean)
            if outcome.error is None:
                tracked = False
            else:
                for place, missed in zip(places, unpack(outcome.error, shapes), strict=True):
                    errors[place].copy_(missed)
        return Outcome(bucket.buffer, error if tracked else None)

    def _program(self, number: int) -> Program:
        return self.rules[number][1] if number < len(self.rules) else self.default
