"""The compiled library: its location, whether it is in use, and if not, why.

The package builds it from the C files of this folder. Without a C compiler the package still installs, and
the pure-torch path computes the same results. `THINWIRE_KERNELS=0` in the environment disables native code
and the Triton kernels of GPUs for a process, and `switched_off()` for the duration of a context.

A plain C library called through ctypes knows addresses and lengths only, so it fits every version of torch
and needs no Python headers. ctypes releases the GIL during a call, so encoding on the wire thread does not
stop backward's Python. Calls run on one thread, because backward rarely leaves a second core idle.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import NamedTuple

VARIABLE = "THINWIRE_KERNELS"
_ABI = 5
"""The number in kernels.h. A library with another number was built from other sources."""
_REBUILD = "reinstall thinwire where a C compiler is installed (in a checkout: pip install -e .)"


class Status(NamedTuple):
    """The state of the native library: in use or not, and why."""

    in_use: bool
    detail: str
    """The file that is loaded, or the reason why none is."""
    remedy: str = ""
    """The instruction to enable native code."""


class Pieces(ctypes.Structure):
    """The struct `Pieces` of blocks.c."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("residuals", ctypes.c_void_p),
        ("errors", ctypes.c_void_p),
        ("keep", ctypes.c_float),
    )


_I32, _I64, _F32, _ADDRESS = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_PIECES = ctypes.POINTER(Pieces)
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "tw_encode": (None, [_I32, _I64, _PIECES, _ADDRESS, _ADDRESS, _ADDRESS]),
    "tw_mean_encode": (
        None,
        [_I32, _I64, _PIECES, _I64, _I64, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS],
    ),
    "tw_decode": (None, [_I32, _I64, _I64, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS]),
    "tw_add": (None, [_I32, _I64, _I64, _ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS, _F32]),
    "tw_finite": (_I32, [_ADDRESS, _I64]),
    "tw_times": (None, [_ADDRESS, _ADDRESS, _I64, _I64, _I64, _ADDRESS, _ADDRESS]),
    "tw_transposed_times": (None, [_ADDRESS, _I64, _I64, _I64, _ADDRESS, _ADDRESS]),
    "tw_product_few": (None, [_ADDRESS, _ADDRESS, _I64, _I64, _I64, _ADDRESS, _ADDRESS]),
    "tw_product_exact": (None, [_ADDRESS, _ADDRESS, _I64, _I64, _I64, _ADDRESS, _ADDRESS]),
    "tw_pack": (None, [_ADDRESS, _I64, _I64, _I64, _ADDRESS]),
    "tw_unpack": (None, [_ADDRESS, _I64, _I64, _I64, _ADDRESS]),
    "tw_pack_positions": (None, [_ADDRESS, _I64, _I64, _I64, _I64, _ADDRESS]),
    "tw_unpack_positions": (None, [_ADDRESS, _I64, _I64, _I64, _I64, _ADDRESS]),
    "tw_largest": (None, [_ADDRESS, _I64, _I64, _I64, _ADDRESS]),
}
"""Result and argument types. A function of a ctypes.CDLL runs without the GIL."""


def native() -> ctypes.CDLL | None:
    """Return the library, or None if native code is not built or is switched off."""
    return None if _switch.off else _loaded()[0]


def status() -> Status:
    """Return whether native code is in use, and if not, why."""
    found = _loaded()[1]
    return (off() or found) if found.in_use else found


def off() -> Status | None:
    """Return how kernels, those of GPUs too, are switched off, or None if they are not."""
    return Status(False, "switched off by switched_off()") if _switch.off else _off_by_variable()


def _off_by_variable() -> Status | None:
    if os.environ.get(VARIABLE, "1") != "0":
        return None
    return Status(False, f"switched off by {VARIABLE}=0", f"unset {VARIABLE}")


@contextmanager
def switched_off() -> Iterator[None]:
    """Use the pure-torch path in all threads while the context is open.

    >>> with switched_off():
    ...     status().in_use
    False
    """
    with _switch.lock:
        _switch.off += 1
    try:
        yield
    finally:
        with _switch.lock:
            _switch.off -= 1


class _Switch:
    """The number of open `switched_off` contexts."""

    def __init__(self) -> None:
        self.off = 0
        self.lock = threading.Lock()


_switch = _Switch()


@cache
def _loaded() -> tuple[ctypes.CDLL | None, Status]:
    """Return the library, or None, and the status that `thinwire doctor` shows."""
    if found := _off_by_variable():
        return None, found
    folder = Path(__file__).parent
    built = [folder / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
    path = next((path for path in built if path.is_file()), None)
    if path is None:
        return None, Status(False, "not built, so codecs run on torch alone", _REBUILD)
    try:
        library = ctypes.CDLL(str(path))
        if (version := int(library.tw_abi())) != _ABI:
            return None, Status(False, f"{path.name} is of version {version}, not {_ABI}", _REBUILD)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        return None, Status(False, f"cannot be loaded ({error})", _REBUILD)
    return library, Status(True, str(path))
