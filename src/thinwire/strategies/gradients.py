"""Plain gradient averaging. A program averages every bucket, and every committed backward is a step."""

from dataclasses import dataclass

from thinwire.programs.description import describe, short
from thinwire.programs.program import Program, ProgramFunction
from thinwire.programs.wrapper import as_program
from thinwire.step.model import require_ddp
from thinwire.step.strategy import Configuration, Context, Strategy, Target


@dataclass(frozen=True, repr=False)
class Gradients(Configuration):
    """A gradient program as a configuration. `attach` wraps the user's program in it."""

    program: ProgramFunction

    def __repr__(self) -> str:
        return repr(self.program)

    @property
    def described(self) -> ProgramFunction:
        """The program, in place of this wrapper, for comparing ranks and for saving."""
        return self.program

    def validate(self, target: Target) -> None:
        """Raise OptionError if it is not a program, or does not fit the model."""
        program = as_program(self.program)
        if not target.model.reduces_gradients:
            require_ddp(target.model, short(self.program))
        describe(self.program)
        program.check(target.model.shapes(), target.model.group.size())

    def bind(self, context: Context) -> Strategy:
        """Return the strategy that runs the program on every bucket."""
        return GradientStrategy(self, context)

    def gradient_program(self) -> Program:
        """Return the program."""
        return as_program(self.program)

    def with_gradient_program(self, program: Program) -> Configuration:
        """Return a configuration of another program."""
        return Gradients(program)


class GradientStrategy(Strategy):
    """A strategy that averages gradients, with one program for each parameter."""

    begins_steps = False


def configuration_of(given: ProgramFunction | Configuration) -> Configuration:
    """Return a configuration unchanged, or wrap a gradient program in `Gradients`."""
    return given if isinstance(given, Configuration) else Gradients(given)


def given_of(config: Configuration) -> ProgramFunction | Configuration:
    """Return the configuration as the user gave it to `attach`, the inverse of `configuration_of`."""
    return config.program if isinstance(config, Gradients) else config
