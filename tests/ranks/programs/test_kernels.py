"""Ranks with and without native code train together on real Gloo ranks."""

import os

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire.kernels import library

CODECS: dict[str, thinwire.Program] = {
    "Int8": thinwire.Int8(),
    "Int4": thinwire.Int4(),
    "Int2": thinwire.Int2(),
    "FP8": thinwire.FP8(),
    "Sign": thinwire.Sign(),
    "TopK": thinwire.TopK(0.1),
}
POWERSGD: dict[str, thinwire.Program] = {
    "PowerSGD": thinwire.PowerSGD(rank=2, warmup=0),
    "PowerSGD bf16": thinwire.PowerSGD(rank=5, min_compression=1.0, factor_dtype="bf16", warmup=0),
}


def trained(rank: int, world_size: int, without: int | None) -> dict[str, torch.Tensor]:
    """Return the parameters after some steps of each program; one rank may have no native code."""
    if rank == without:
        os.environ[library.VARIABLE] = "0"
    assert library.status().in_use == (rank != without)
    results = {}
    for name, program in (CODECS | POWERSGD).items():
        ddp = DDP(mlp(), bucket_cap_mb=0.002)
        thinwire.attach(ddp, program)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
        for step in range(8):
            optimizer.zero_grad()
            ddp(batch(rank, step)).square().mean().backward()
            optimizer.step()
        results[name] = flat_parameters(ddp.module)
    return results


def test_a_rank_without_native_code_trains_the_same_model() -> None:
    # Not a mark: ranks import this module before they set their environment.
    in_use, detail, _ = library.status()
    if not in_use:
        pytest.skip(detail)
    # Fresh processes: one looks for native code once.
    both, mixed = (run_ranks(trained, 2, without, fresh=True) for without in (None, 1))
    for name in CODECS | POWERSGD:
        assert torch.equal(mixed[0][name], mixed[1][name]), f"{name}: replicas differ"
        assert torch.equal(both[0][name], both[1][name]), f"{name}: replicas differ"
    for name in CODECS:
        assert torch.equal(mixed[0][name], both[0][name]), f"{name}: native code changes the result"
    for name in POWERSGD:  # M Q and M^T P may differ in their last bits
        torch.testing.assert_close(mixed[0][name], both[0][name], rtol=1e-2, atol=1e-3)
