"""Facts about the machine: devices, versions, variables, topology. No host names."""

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from typing import Any

import torch
import torch.distributed as dist

from thinwire.kernels import library
from thinwire.kernels.triton import launch
from thinwire.tools.doctor.check import OK, Outcome, Surroundings
from thinwire.version import __version__

_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "TORCH_DISTRIBUTED_", "THINWIRE_", "OMP_NUM_THREADS")


def facts(around: Surroundings) -> Outcome:
    """Return versions, the device, the variables that change communication, and the topology."""
    found: dict[str, Any] = {
        "thinwire": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": _nccl_version(),
        "triton": _package_version("triton"),
        "kernels": library.status().detail.rpartition("/")[2],
        "kernels on GPUs": launch.status().detail,
        "backend": around.backend,
        "device": str(around.device),
        "properties": _properties(around),
        "driver": _asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[
            0
        ],
        "topology": _asked("nvidia-smi", "topo", "-m"),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
        "local ranks": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    }
    name = found["properties"].get("name", around.device.type)
    text = f"{name}, torch {torch.__version__}, {around.backend}"
    if found["nccl"]:
        text += f" {found['nccl']}"
    return Outcome(OK, text, found)


def _nccl_version() -> str:
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _properties(around: Surroundings) -> dict[str, str]:
    asked = getattr(around.module, "get_device_properties", None)
    found = asked(around.device) if callable(asked) and around.device.type != "cpu" else None
    names = ("name", "major", "minor", "total_memory", "multi_processor_count")
    return {name: str(getattr(found, name)) for name in names if hasattr(found, name)}


def _asked(*words: str) -> str:
    """Return what a program prints, or an empty text where it is missing or fails."""
    if shutil.which(words[0]) is None:
        return ""
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()


def without_host_names(text: str) -> str:
    """Return a text without the names of this host and of the rendezvous."""
    names = {socket.gethostname(), platform.node(), os.environ.get("MASTER_ADDR", "")}
    for name in sorted(names, key=len, reverse=True):  # a short name is a part of the full one
        if len(name) > 2 and name not in ("127.0.0.1", "localhost"):
            text = text.replace(name, "HOST")
    return text
