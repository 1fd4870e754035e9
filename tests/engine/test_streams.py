"""The inline engine of accelerators on the shadow device: where programs run, and what they wait for.

The races that its precautions prevent are in tests/shadow/test_sabotage.py.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import run_ranks
from tests.shadow import device
from tests.shadow.device import SHADOW
from thinwire.engine.comm.group_communicator import GroupCommunicator
from thinwire.engine.engine import Engine
from thinwire.engine.ops import AllReduce, Collectives


def current() -> int:
    return int(torch.accelerator.current_stream().stream_id)


def two_stages(
    log: list[tuple[str, int]], bucket: int, gradients: list[torch.Tensor]
) -> Collectives[torch.Tensor]:
    """Two collectives of the bucket's gradients. Its second stage touches those of the next but one."""
    log.append((f"encode {bucket}", current()))
    mean = yield AllReduce(gradients[bucket].mul(2))
    log.append((f"combine {bucket}", current()))
    if bucket + 2 < len(gradients):
        gradients[bucket + 2].add(1)
    mean = yield AllReduce(mean)
    log.append((f"decode {bucket}", current()))
    result: torch.Tensor = mean.mul(2)
    return result


def run(rank: int, world_size: int) -> tuple[list[tuple[str, int]], list[str], int, Any]:
    assert dist.group.WORLD is not None
    shadow = torch.device("shadow", 0)
    communicator = GroupCommunicator(dist.group.WORLD, timedelta(seconds=120))
    communicator.open()
    engine = Engine(communicator, device=shadow)
    log: list[tuple[str, int]] = []
    gradients = [torch.zeros(4, device=shadow) for _ in range(3)]
    device.reset()
    for bucket, gradient in enumerate(gradients):
        gradient.fill_(1)  # by backward, just before the hook
        program = two_stages(log, bucket, gradients)
        engine.submit(program, step=0, label="it", last=bucket == 2, instead=gradient)
    engine.settle()
    backward, times = current(), engine.stats().records[0].wire_seconds
    engine.close()
    return log, device.races(), backward, times


def test_programs_run_on_a_side_stream_and_wait_only_for_the_gradients_they_need() -> None:
    for log, races, backward, times in run_ranks(run, 2, backend=SHADOW):
        assert len({stream for _, stream in log}) == 1
        assert log[0][1] != backward
        # Bucket 0 combines before the side stream waits for the gradients of bucket 2, although its second
        # collective comes after the first one of that bucket.
        stages = ["encode 0", "encode 1", "combine 0", "encode 2", "combine 1", "combine 2"]
        assert [stage for stage, _ in log] == [*stages, "decode 0", "decode 1", "decode 2"]
        # So what bucket 0 reads of bucket 2 in its second stage is the one access that no event orders. If
        # that stage waited for backward's newest work, there would be none.
        assert len(races) == 1
        assert "fill" in races[0]
        assert times is None, "host times say nothing of a device"
