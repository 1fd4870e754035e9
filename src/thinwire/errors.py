"""Everything thinwire raises.

ThinwireError
├── OptionError       a value that an option cannot take          (also a ValueError)
├── AttachError       a model that cannot be attached             (also a RuntimeError)
├── ProgramError      a program that broke the rules of the wire  (also a RuntimeError)
├── MismatchError     ranks that were set up differently          (also a RuntimeError)
├── DriftError        replicas that no longer hold the same model (also a RuntimeError)
├── DivergedError     models whose average is not finite          (also a RuntimeError)
├── AuditError        compression that exceeds its error limit    (also a RuntimeError)
├── WireError         a collective that failed or took too long   (also a RuntimeError)
├── StateError        a state_dict that does not fit              (also a ValueError)
├── LabError          an emulated network that failed             (also a RuntimeError)
└── UnavailableError  something thinwire does not offer here      (also a RuntimeError)

Each message shows the value, the cause and the way out.
"""


class ThinwireError(Exception):
    """The base of every exception raised by thinwire."""


class OptionError(ThinwireError, ValueError):
    """An option was given a value it cannot take."""


class AttachError(ThinwireError, RuntimeError):
    """The model cannot be attached; nothing was changed."""


class ProgramError(ThinwireError, RuntimeError):
    """A program yielded, returned or raised something the wire cannot carry."""


class MismatchError(ThinwireError, RuntimeError):
    """Ranks disagree about program, versions or parameters; raised on every rank."""


class DriftError(ThinwireError, RuntimeError):
    """A parameter is no longer bit-identical on all ranks; raised on every rank."""


class DivergedError(ThinwireError, RuntimeError):
    """The average of the ranks' models is infinite or NaN; raised on every rank, nothing was changed."""


class AuditError(ThinwireError, RuntimeError):
    """An audit found a compressed mean farther from the exact one than allowed; raised on every rank."""


class WireError(ThinwireError, RuntimeError):
    """A collective failed or exceeded its time limit: a peer died, stalled or went another way."""


class StateError(ThinwireError, ValueError):
    """A state_dict does not fit; the running state was left as it is."""


class LabError(ThinwireError, RuntimeError):
    """An emulated network could not be built, or what ran on it failed."""


class UnavailableError(ThinwireError, RuntimeError):
    """Asked for something that thinwire does not offer, or not in this set-up."""
