"""Predicted times on GPUs that are not at hand, from data sheets. Nothing here is measured.

A program's work on a chunk of n float32 gradients takes, in all of its stages together,

    encode = launches * launch_seconds + moved / memory_rate
    moved  = (first + middle + last) * n + sum over collectives of 2 * message

`message` is the bytes that a rank sends in a collective, which one stage writes and the next one reads.
`first`, `middle` and `last` are the other bytes that the stages read and write, per number (`KERNELS`). For a
quantizer with b bits, in fused kernels, the terms are

    encode  reads the gradient and the residual (4 + 4), writes the residual (4) and the code (b / 8)
    middle  reads the codes of the other ranks (b / 8), writes the code of their mean (b / 8)
    decode  reads the codes of the means (b / 8), writes the mean (4)

A step without communication takes 6 * parameters * tokens / (UTILISATION * flops): two operations for each
parameter and token forward, four backward. All stages delay backward, which uses the same device. Launches
are counted as time of the device, which is an upper bound: they overlap with kernels where the host runs
ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from thinwire.errors import OptionError
from thinwire.plan.network import Network
from thinwire.plan.traffic import Layout, traffic
from thinwire.programs.description import short

LAUNCH_SECONDS = 5e-6
"""Assumed time of a kernel launch. Not in data sheets; `thinwire doctor --accelerator` measures it."""
UTILISATION = 0.4
"""Assumed share of the peak of bf16 operations that training reaches."""
TOKENS = 8192
"""Default number of tokens for each device and step."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU as its data sheet describes it.

    Attributes:
        name: Its name on the command line.
        title: Its full name.
        memory_rate: Bytes per second of its memory, reads and writes together.
        flops: Dense bf16 operations per second with sums in float32.
        source: The data sheet.
        launch_seconds: Assumed time of a kernel launch.
    """

    name: str
    title: str
    memory_rate: float
    flops: float
    source: str
    launch_seconds: float = LAUNCH_SECONDS

    @property
    def copy_rate(self) -> float:
        """Bytes per second of a copy, which reads and writes each byte."""
        return self.memory_rate / 2

    def step_seconds(self, parameters: float, tokens: float) -> float:
        """Return the time of a transformer's step without communication.

        >>> round(DEVICES["h100"].step_seconds(7e9, 8192), 2)
        0.87
        """
        return 6 * parameters * tokens / (UTILISATION * self.flops)

    def connect(self, network: Network) -> Network:
        """Return the network as the device's collectives use it.

        They run on the device, so the measured rates of Gloo on processors do not apply. A message is assumed
        to take the time of one launch.
        """
        unlimited = float("inf")
        return replace(
            network,
            reduce_rate=unlimited,
            narrow_rate=unlimited,
            message_rate=unlimited,
            message_seconds=self.launch_seconds,
        )


DEVICES = {
    device.name: device
    for device in (
        Device(
            name="a100",
            title="NVIDIA A100 80GB SXM",
            memory_rate=2.039e12,
            flops=312e12,
            source="NVIDIA A100 Tensor Core GPU datasheet, https://www.nvidia.com/en-us/data-center/a100/",
        ),
        Device(
            name="h100",
            title="NVIDIA H100 SXM",
            memory_rate=3.35e12,
            flops=989e12,  # the sheet's 1,979 is with sparsity
            source="NVIDIA H100 Tensor Core GPU datasheet, https://www.nvidia.com/en-us/data-center/h100/",
        ),
        Device(
            name="l40s",
            title="NVIDIA L40S",
            memory_rate=864e9,
            flops=362e12,  # the sheet's 733 is with sparsity
            source="NVIDIA L40S datasheet, https://www.nvidia.com/en-us/data-center/l40s/",
        ),
        Device(
            name="4090",
            title="NVIDIA GeForce RTX 4090",
            memory_rate=1.008e12,
            flops=165e12,  # with sums in float32; the sheet's 330 is with sums in float16 or sparsity
            source="NVIDIA Ada GPU Architecture whitepaper, appendix A,"
            " https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
        ),
    )
}


def find_device(name: str) -> Device:
    """Return the device of a name on the command line.

    Raises:
        OptionError: There is no such device.
    """
    found = DEVICES.get(name.strip().lower().removeprefix("rtx").strip())
    if found is None:
        raise OptionError(
            f"device={name!r} is not known: choose from {', '.join(DEVICES)}; for another, plan on it without"
            " --device"
        )
    return found


def device_named(title: str) -> Device | None:
    """Return the device that torch calls `title`, or None if there is no data sheet for it.

    >>> device_named("NVIDIA H100 80GB HBM3").name, device_named("NVIDIA GeForce RTX 4090 D")
    ('h100', None)
    """
    words = title.lower().replace("-", " ").split()
    # Variants have other figures than the SXM boards and the plain 4090.
    if {"d", "pcie", "nvl", "laptop", "40gb"} & set(words):
        return None
    return next((device for name, device in DEVICES.items() if name in words), None)


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernels of a program.

    Launches are `bucket + shape * shapes` per chunk of gradients, for any number of ranks and matrices.

    Attributes:
        bucket: Launches for each chunk.
        shape: More launches for each different shape of its matrices.
        first: Bytes per number that the first stage reads and writes, without messages.
        middle: The same of all stages between the first and the last.
        last: The same of the last stage.
    """

    bucket: int
    shape: int = 0
    first: float = 0.0
    middle: float = 0.0
    last: float = 0.0


_FUSED = Kernels(bucket=8, first=12.0, last=4.0)
KERNELS = {
    "Exact": Kernels(bucket=1, first=8.0),
    "BF16": Kernels(bucket=2, first=4.0, last=4.0),
    "FP16": Kernels(bucket=2, first=4.0, last=4.0),
    # Fused kernels: one pass for each stage, as in the docstring on top.
    "Int8": _FUSED,
    "Int4": _FUSED,
    "Int2": _FUSED,
    "FP8": _FUSED,
    "Sign": _FUSED,
    "TopK": _FUSED,
    # Plain torch operators, counted on fake CUDA tensors by `benchmarks/plan_devices.py --count`.
    "PowerSGD": Kernels(bucket=29, shape=14, first=16.0, middle=5.0, last=72.0),
    "PowerSGD, int8": Kernels(bucket=102, shape=16, first=16.0, middle=7.0, last=41.0),
}
"""Kernels by the name of a program."""
OTHERS = Kernels(bucket=40, first=66.0, middle=48.0, last=13.0)
"""Kernels of all other programs: those of Int8 in plain torch operators."""


def kernels_of(layout: Layout) -> Kernels:
    """Return the kernels of a layout's program."""
    text = short(layout.program)
    name = text.partition("(")[0]
    if name == "PowerSGD" and "factor_dtype='int8'" in text:
        name = "PowerSGD, int8"
    return KERNELS.get(name, OTHERS)


@dataclass(frozen=True)
class Work:
    """The work of a program on a device.

    Attributes:
        launches: The number of kernels.
        moved: Bytes that they read and write in the device's memory, by stage.
    """

    launches: int
    moved: tuple[float, ...]


def work(layout: Layout, ranks: int, step: int) -> Work:
    """Return the work of a layout on each rank.

    Args:
        layout: The gradients and their program.
        ranks: The number of ranks.
        step: The step, for programs with a warm-up.
    """
    kernels = kernels_of(layout)
    messages = [transfer.sent for transfer in traffic(layout, ranks, step).transfers]
    stages = len(messages) + 1
    moved = [0.0] * stages
    # A stage writes the message that it sends, and reads the one that the stage before it sent.
    for place, message in enumerate(messages):
        moved[place] += message
        moved[place + 1] += message
    moved[0] += kernels.first * layout.numbers
    moved[-1] += kernels.last * layout.numbers
    between = range(1, stages - 1) if stages > 2 else range(stages)
    for place in between:
        moved[place] += kernels.middle * layout.numbers / len(between)
    shapes = {(shape[0], shape.numel()) for shape in layout.shapes if len(shape) > 1}
    return Work(kernels.bucket + kernels.shape * len(shapes), tuple(moved))


@dataclass(frozen=True)
class DeviceSpeeds:
    """Times of programs on a device that is not at hand, predicted from its data sheet.

    It takes the place of `thinwire.plan.encode.Speeds`, which measures on this machine.

    Attributes:
        device: The device.
    """

    device: Device

    def seconds(self, layout: Layout, ranks: int, step: int) -> tuple[float, ...]:
        """Return the time of each stage of a layout. Launches are divided equally among stages."""
        found = work(layout, ranks, step)
        launching = found.launches * self.device.launch_seconds / len(found.moved)
        return tuple(launching + moved / self.device.memory_rate for moved in found.moved)

    def spread(self) -> float:
        """Return 0, because nothing is measured."""
        return 0.0

    def terms(self, layouts: Sequence[tuple[Layout, int]], step: int) -> Work:
        """Return the work of several layouts, each with its number of ranks, in one stage."""
        found = [work(layout, ranks, step) for layout, ranks in layouts]
        return Work(sum(each.launches for each in found), (sum(sum(each.moved) for each in found),))
