"""Kernels that a program launches for one bucket, counted on fake CUDA tensors. No GPU is needed.

    .venv/bin/python benchmarks/launches.py

The bucket has a matrix, a convolution and a vector, 5.5 MB in all. A launch is an operator of torch that
computes or copies, or a Triton kernel. The peak of memory is in sizes of the bucket, which is part of it, as
are the residuals.

    by owner   a codec is called for one rank's chunk at a time, as on a CPU, and before there was a choice
    torch      all chunks are one matrix, for accelerators without Triton
    Triton     one kernel for each phase
"""

from collections.abc import Callable
from functools import partial

import pytest

from tests.fake_cuda.device import unavailable
from tests.fake_cuda.test_programs import FUSED, LARGE, Run, check, check_triton
from thinwire import Bucket, Codec
from thinwire.programs import twoshot
from thinwire.programs.bucket_coder import OwnersCoder
from thinwire.programs.coding import coders_of
from thinwire.programs.division import Division

RANKS = (2, 8, 32, 512)
PROGRAMS = {
    **{name: f"{name} of {name.partition('(')[0]}" for name in FUSED},
    "PowerSGD(rank=2)": "PowerSGD(rank=2, min_compression=1, warmup=0) of PowerSGD",
    "BF16()": "BF16() of BF16",
}


def check_owners(case: str, ranks: int) -> Run:
    """Run a program's steps with a call of the codec for every owner."""

    def by_owner(codec: Codec, bucket: Bucket) -> OwnersCoder:
        coders = coders_of(codec, bucket)
        return OwnersCoder(bucket, coders, Division.of(bucket, coders[0].block))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twoshot, "bucket_coder_of", by_owner)
        return check(case, ranks, shapes=LARGE)


def main() -> None:
    """Print the table."""
    if reason := unavailable():
        raise SystemExit(reason)
    print(
        f"{'launches a bucket, by ranks':<32}" + "".join(f"{ranks:>7}" for ranks in RANKS) + "   peak memory"
    )
    for name, case in PROGRAMS.items():
        ways: dict[str, Callable[[int], Run]] = {"torch": partial(check, case, shapes=LARGE)}
        if name in FUSED:
            ways = {"by owner": partial(check_owners, case), **ways, "Triton": partial(check_triton, case)}
        for way, count in ways.items():
            runs = [count(ranks) for ranks in RANKS]
            row = "".join(f"{run.launches:>7}" for run in runs)
            print(f"{name:<23}{way:<9}{row}{max(run.memory_used for run in runs):>12.1f} x", flush=True)


if __name__ == "__main__":
    main()
