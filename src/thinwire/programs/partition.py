"""A program that runs different programs for different parameters."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from thinwire.engine.ops import Collectives
from thinwire.engine.pack import pack, unpack
from thinwire.programs.allreduce import Exact
from thinwire.programs.memory import Memory
from thinwire.programs.program import Bucket, Outcome, Program
from thinwire.programs.rules import Rules, check_used, checked_rules, parameters_by_rule, rule_of
from thinwire.programs.wrapper import adapt


@dataclass(frozen=True, repr=False)
class Partition(Program):
    """A program that averages each parameter with the program of the first rule that fits it.

    Use it within other programs, such as `AcrossNodes`. Elsewhere prefer `attach(ddp, program, rules=...)`,
    which keeps collectives of several programs in flight at once. Each program receives its parameters of a
    bucket as a separate bucket.

    Args:
        rules: Pairs of a pattern, or a `Size`, and a program. In a pattern `*` matches anything and `?` one
            character, as in "*.bias" and "embed.*".
        default: Program of parameters that no rule fits.

    Raises:
        OptionError: `rules` are not such pairs, or `default` is not a program. `attach` raises it if a rule
            fits no parameter of the model, or only parameters that earlier rules fit.

    Example::

        rules = [("*norm*", thinwire.Exact()), ("*.bias", thinwire.Exact())]
        wire = thinwire.attach(ddp, thinwire.Partition(rules, default=thinwire.Int4()))
    """

    rules: Rules
    default: Program = field(default_factory=Exact)

    exact_vectors = False  # the rules decide
    # Programs receive parts of the bucket. Its residuals belong to the whole, and sparse ones have no parts.
    folds_residuals = False
    takes_sparse = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", checked_rules(self.rules))
        adapt(self, "default")

    @property
    def inner(self) -> tuple[Program, ...]:
        """The programs of all rules, and the default."""
        return (*(program for _, program in checked_rules(self.rules)), self.default)

    def check(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        """Raise OptionError for a rule that no parameter uses, most likely because of a misspelt name.

        Raises:
            OptionError: A rule fits no parameter, or only parameters that earlier rules fit. Or a program
                does not fit the parameters that use it.
        """
        check_used(self.rules, shapes)
        for number, own in parameters_by_rule(self.rules, shapes).items():
            self.inner[number].check(own, world_size)

    def __call__(self, bucket: Bucket, memory: Memory) -> Collectives[Outcome]:
        """Run one program after another, each on its own parameters of the bucket."""
        # A slice of a parameter within AcrossNodes uses the rule of the whole parameter.
        members: dict[int, list[int]] = {}
        wholes = bucket.whole_shapes or bucket.shapes
        for place, (name, shape) in enumerate(zip(bucket.names, wholes, strict=True)):
            members.setdefault(rule_of(self.rules, name, shape), []).append(place)
        if len(members) == 1:
            (number,) = members
            return (yield from self.inner[number](bucket, memory))
        views, tracked = unpack(bucket.buffer, bucket.shapes), bucket.track_error
        error = torch.empty_like(bucket.buffer)
        errors = unpack(error, bucket.shapes)
        # In order of the rules, which all ranks share.
        for number, places in sorted(members.items()):
            shapes = tuple(bucket.shapes[place] for place in places)
            part = replace(
                bucket,
                buffer=pack([views[place] for place in places]),
                names=tuple(bucket.names[place] for place in places),
                shapes=shapes,
                whole_shapes=tuple(wholes[place] for place in places),
            )
            outcome = yield from self.inner[number](part, memory)
            for place, mean in zip(places, unpack(outcome.mean, shapes), strict=True):
                views[place].copy_(mean)
            if outcome.error is None:
                tracked = False
            else:
                for place, missed in zip(places, unpack(outcome.error, shapes), strict=True):
                    errors[place].copy_(missed)
        return Outcome(bucket.buffer, error if tracked else None)
