"""Builds C++ for tests against the torch in use, once for all processes, or says why it cannot.

Libraries are cached in build/tests, under the hash of everything that they depend on. A test that needs one
is skipped with the reason that `missing` returns.
"""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

_FOLDER = Path(__file__).resolve().parent.parent / "build" / "tests"
_TORCH = Path(torch.__file__).parent
_LIMIT = 600
"""Seconds after which a compiler is taken for hung. It needs 30 on one idle core."""


@functools.cache
def missing(python: bool = False) -> str | None:
    """Return why C++ cannot be built here, or None if it can.

    Args:
        python: Whether the source is an extension module, which needs Python's headers too.
    """
    if _compiler() is None:
        return "no C++ compiler: c++, g++ or clang++ is not installed, and CXX is not set"
    if not (_TORCH / "include" / "c10").is_dir():
        return f"torch {torch.__version__} is installed without its C++ headers"
    if python and not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers are not installed"
    return None


def library(source: Path, *, python: bool = False) -> Path:
    """Compile one C++ file, with the headers beside it, or return the library that was compiled before.

    Processes that need the same library wait for the first, which compiles it.

    Args:
        source: The C++ file.
        python: Whether it is an extension module, named after the file.

    Returns:
        The library. An extension module is imported from this path.

    Raises:
        RuntimeError: The compiler failed. The message has its output.
    """
    command = _command(source, python)
    sources = [source, *sorted(source.parent.glob("*.h"))]
    texts = [file.read_text() for file in sources]
    facts = [*texts, torch.__version__, sysconfig.get_config_var("SOABI") or "", *command]
    name = f"{source.stem}-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:16]}"
    built = _FOLDER / f"{name}.so"
    if built.exists():
        return built
    _FOLDER.mkdir(parents=True, exist_ok=True)
    # The lock ends with its process, so that a killed build blocks no later one.
    with open(_FOLDER / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            # Renamed when it is complete: a process that finds the library does not take the lock.
            unfinished = _FOLDER / f"{name}.{os.getpid()}"
            run = subprocess.run(
                [*command, str(source), "-o", str(unfinished), *_linked(python)],
                capture_output=True,
                text=True,
                timeout=_LIMIT,
            )
            if run.returncode:
                raise RuntimeError(
                    f"{source.name} does not compile with torch {torch.__version__}:\n{run.stderr}"
                )
            unfinished.rename(built)
    return built


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def _command(source: Path, python: bool) -> list[str]:
    compiler = _compiler()
    assert compiler is not None, "call `missing` first"
    headers = [_TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include"]
    abi = int(torch.compiled_with_cxx11_abi())
    # Without optimisation: the compiler's time is what counts here.
    options = ["-std=c++20", "-O0", "-fPIC", "-shared", "-w", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]
    if python:
        headers.append(Path(sysconfig.get_path("include")))
        options.append(f"-DTORCH_EXTENSION_NAME={source.stem}")
    return [compiler, *options, *(f"-I{header}" for header in headers)]


def _linked(python: bool) -> list[str]:
    """Return the linker's options, which come after the source."""
    names = ["torch", "torch_cpu", "c10", *(["torch_python"] if python else [])]
    folder = _TORCH / "lib"
    return [f"-L{folder}", f"-Wl,-rpath,{folder}", *(f"-l{name}" for name in names)]
