"""Detection of DDP communication hooks where a program is expected. Both take two arguments."""

import functools
import inspect
from enum import Enum

from thinwire.errors import OptionError

_TORCH, _OURS = "torch.distributed.algorithms.ddp_comm_hooks", "thinwire.ddp_comm_hooks"
_PROGRAMS = {
    "allreduce_hook": "Exact()",
    "fp16_compress_hook": "FP16()",
    "fp16_compress_wrapper": "FP16()",
    "bf16_compress_hook": "BF16()",
    "bf16_compress_wrapper": "BF16()",
    "powerSGD_hook": "PowerSGD(rank=4)",
    "batched_powerSGD_hook": "PowerSGD(rank=4, flatten=True)",
    "quantization_pertensor_hook": "Int8()",
    "quantization_perchannel_hook": "Int8()",
    "post_localSGD_hook": "LocalSGD(period=8)",
    "hook_with_zero_step": "ZeRO()",
    "hook_with_zero_step_interleaved": "ZeRO(interleaved=True)",
}
"""The program or configuration in place of each torch-named hook, or of the function that makes it."""


def refuse_hook(program: object, option: str) -> None:
    """Raise OptionError if `program` is a communication hook, which takes (state, bucket).

    Args:
        program: The value to check: a hook of torch's, thinwire's or the user's, a `functools.partial` of
            one, or a `DDPCommHookType`.
        option: The name of the option, for the error.
    """
    hook = _hook_in(program)
    if hook is None:
        return
    module, name = getattr(hook, "__module__", ""), getattr(hook, "__qualname__", repr(hook)).split(".")[0]
    known = module.startswith((_TORCH, _OURS))
    program_text = f"pass thinwire.{_PROGRAMS[name]}, or " if known and name in _PROGRAMS else ""
    place = f"{module.replace(_TORCH, _OURS)}.{name}" if known else name
    raise OptionError(
        f"{option}={name} is a communication hook, which takes a state and DDP's bucket, and not a program:"
        f" {program_text}register the hook on a DDP model without a wire, as in"
        f" ddp.register_comm_hook(state, {place})"
    )


def _hook_in(program: object) -> object:
    """Return the hook that a value is or contains, recognised by its annotation, or None."""
    if isinstance(program, Enum):
        program = program.value
    while isinstance(program, functools.partial):
        program = program.keywords.get("comm_hook", program.func)
    if isinstance(program, type) or not callable(program):
        return None
    try:
        kinds = [one.annotation for one in inspect.signature(program).parameters.values()]
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    names = [one if isinstance(one, str) else getattr(one, "__name__", "") for one in kinds]
    return program if any(name.split(".")[-1] == "GradBucket" for name in names) else None
