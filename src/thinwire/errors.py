"""The exceptions that thinwire raises.

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
└── UnavailableError  a feature that is not available here        (also a RuntimeError)

Each message contains the value, the cause and a way to fix it.
"""


class ThinwireError(Exception):
    """The base of every exception raised by thinwire."""


class OptionError(ThinwireError, ValueError):
    """A value that an option cannot take."""


class AttachError(ThinwireError, RuntimeError):
    """A model that cannot be attached. The model is unchanged."""


class ProgramError(ThinwireError, RuntimeError):
    """A program that yielded, returned or raised something that the wire cannot carry."""


class MismatchError(ThinwireError, RuntimeError):
    """Ranks with different programs, versions or parameters. Raised on every rank."""


class DriftError(ThinwireError, RuntimeError):
    """A parameter that is no longer bit-identical on all ranks. Raised on every rank."""


class DivergedError(ThinwireError, RuntimeError):
    """A non-finite average of the ranks' models. Raised on every rank. The models are unchanged."""


class AuditError(ThinwireError, RuntimeError):
    """A compressed mean that is farther from the exact one than allowed. Raised on every rank."""


class WireError(ThinwireError, RuntimeError):
    """A collective that failed or timed out, because a rank died, stalled or ran different code."""


class StateError(ThinwireError, ValueError):
    """A state_dict that does not fit. The running state is unchanged."""


class LabError(ThinwireError, RuntimeError):
    """An emulated network that could not be built, or a command that failed on it."""


class UnavailableError(ThinwireError, RuntimeError):
    """A feature that thinwire does not support, or not in this configuration."""
