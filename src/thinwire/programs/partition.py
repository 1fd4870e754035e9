"""Different programs for different parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import torch

from thinwire.errors import OptionError
from thinwire.programs.allreduce import Exact
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program, require_program
from thinwire.wire.ops import Steps
from thinwire.wire.pack import pack, unpack


@dataclass(frozen=True)
class Partition:
    """Gives every parameter to the program of the first pattern that fits its name.

    Args:
        rules: Pairs of a pattern and a program. In patterns `*` stands for anything and `?` for one
            character: "*.bias", "embed.*".
        default: The program of parameters that no pattern fits.

    Each program sees its parameters of a bucket as a bucket of their own. `attach` refuses patterns that fit
    no parameter of the model, or that earlier ones leave nothing to.

    Example::

        rules = [("*norm*", thinwire.Exact()), ("*.bias", thinwire.Exact())]
        wire = thinwire.attach(ddp, thinwire.Partition(rules, default=thinwire.Int4()))
    """

    rules: Sequence[tuple[str, Program]]
    default: Program = field(default_factory=Exact)

    def __post_init__(self) -> None:
        pairs = isinstance(self.rules, list | tuple) and all(
            isinstance(rule, list | tuple) and len(rule) == 2 and isinstance(rule[0], str)
            for rule in self.rules
        )
        if not pairs:
            raise OptionError(
                f"rules={self.rules!r} must be pairs of a pattern and a program, such as"
                ' [("*.bias", thinwire.Exact())]'
            )
        for pattern, program in self.rules:
            require_program(program, f"the program for {pattern!r}")
        require_program(self.default, "default")
        object.__setattr__(self, "rules", tuple((pattern, program) for pattern, program in self.rules))

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Refuse rules that no parameter follows: most likely a name is misspelt."""
        taken = {self._rule(name) for name in shapes}
        for number, (pattern, _) in enumerate(self.rules):
            if number in taken:
                continue
            fits = [name for name in shapes if fnmatchcase(name, pattern)]
            cause = (
                f"earlier patterns take all it fits ({_some(fits)}): put it before them"
                if fits
                else f"it fits no parameter of this model, which has {_some(list(shapes))}"
            )
            raise OptionError(f"the rule for {pattern!r} is never used: {cause}")

    def __call__(self, bucket: Bucket, memory: Memory) -> Steps[Outcome]:
        """One program after another, each on its own parameters of the bucket."""
        members: dict[int, list[int]] = {}
        for place, name in enumerate(bucket.names):
            members.setdefault(self._rule(name), []).append(place)
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

    def _rule(self, name: str) -> int:
        """The number of the first rule that fits; that of the default comes after all."""
        fitting = (number for number, (pattern, _) in enumerate(self.rules) if fnmatchcase(name, pattern))
        return next(fitting, len(self.rules))

    def _program(self, number: int) -> Program:
        return self.rules[number][1] if number < len(self.rules) else self.default


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
