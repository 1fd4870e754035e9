"""Tests that every codec and program of thinwire passes, for your own codecs and programs.

    thinwire.testing.check_codec(MyCodec())
    thinwire.testing.check_program(MyProgram())
    thinwire.testing.check_hook(register_my_hook)

Each raises AssertionError with the cause. They need only torch.
"""

from thinwire.engine.simulate import simulate
from thinwire.testing.codec import check_codec
from thinwire.testing.hook import HookReport, check_hook
from thinwire.testing.program import check_program
from thinwire.testing.ranks import SimulatedRanks

__all__ = ["HookReport", "SimulatedRanks", "check_codec", "check_hook", "check_program", "simulate"]


def __dir__() -> list[str]:
    return sorted(__all__)
