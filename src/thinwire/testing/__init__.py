"""The battery that every codec and program of thinwire passes, for yours.

    thinwire.testing.check_codec(MyCodec())
    thinwire.testing.check_program(MyProgram())
    thinwire.testing.check_hook(register_my_hook)

Each raises AssertionError with what went wrong; nothing but torch is needed.
"""

from thinwire.testing.codec import check_codec
from thinwire.testing.hook import HookReport, check_hook
from thinwire.testing.program import check_program
from thinwire.testing.ranks import SimulatedRanks

__all__ = ["HookReport", "SimulatedRanks", "check_codec", "check_hook", "check_program"]
