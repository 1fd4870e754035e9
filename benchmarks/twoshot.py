"""Time that programs compute in a step, without a network: with native code, with torch alone, and sliced.

    .venv/bin/python -m benchmarks.twoshot

Two simulated ranks average the gradients of a small GPT. The table shows milliseconds of CPU time of one rank
in a step, the median of many, and gigabytes of float32 gradients per second.
"""

import statistics
import time

import torch

from thinwire import Int2, Int4, Int8, Program, Sign
from thinwire.kernels.library import status, switched_off
from thinwire.testing import SimulatedRanks

WIDTH, LAYERS, WORLD, ROUNDS = 256, 6, 2, 15


def shapes() -> dict[str, tuple[int, ...]]:
    """Shapes of a GPT with embeddings, attention, feed-forward layers and norms."""
    found: dict[str, tuple[int, ...]] = {"embed": (1024, WIDTH)}
    for layer in range(LAYERS):
        for name, form in (
            ("norm", (WIDTH,)),
            ("attention", (3 * WIDTH, WIDTH)),
            ("out", (WIDTH, WIDTH)),
            ("up", (4 * WIDTH, WIDTH)),
            ("up.bias", (4 * WIDTH,)),
            ("down", (WIDTH, 4 * WIDTH)),
        ):
            found[f"{layer}.{name}"] = form
    return found


def milliseconds(program: Program) -> float:
    """Return the median time of one rank in a step."""
    forms = shapes()
    vectors = {name for name, form in forms.items() if len(form) == 1}
    ranks = SimulatedRanks(program, forms, WORLD, vectors)
    length = sum(torch.Size(form).numel() for form in forms.values())
    gradients = list(torch.randn(WORLD, length, generator=torch.Generator().manual_seed(0)))
    times = []
    for _ in range(ROUNDS):
        started = time.process_time()
        ranks.step(gradients)
        times.append((time.process_time() - started) / WORLD)
    return 1000 * statistics.median(times)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    size = 4 * sum(torch.Size(form).numel() for form in shapes().values()) / 1e6
    print(f"{size:.0f} MB of gradients, {WORLD} ranks; native code: {status().detail}")
    print(f"{'program':28}{'native':>20}{'torch':>20}")
    for program in (Int8(), Int8(error_feedback=False), Int4(), Int2(), Sign()):
        native = milliseconds(program)
        with switched_off():
            plain = milliseconds(program)
        cells = [f"{ms:.1f} ms {size / ms:.1f} GB/s" for ms in (native, plain)]
        print(f"{program!s:28}{cells[0]:>20}{cells[1]:>20}")


if __name__ == "__main__":
    main()
