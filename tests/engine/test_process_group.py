"""The private calls of the engine into torch.distributed, in one process. Groups of several ranks are in
`tests/ranks/engine/test_groups.py`, those of an accelerator in `tests/shadow/`."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from thinwire.engine.comm.process_group import HiddenGroup, new_group, time_limit

DEVICE = torch.device("cuda", 0)
LIMIT = timedelta(seconds=30)


@pytest.fixture
def world(alone: None) -> Iterator[dist.ProcessGroup]:
    """A world of one that is bound to a device, as `init_process_group(device_id=...)` leaves it."""
    group = dist.group.WORLD
    assert group is not None
    group.bound_device_id = DEVICE
    yield group
    assert group.bound_device_id == DEVICE, "the default group lost its device"
    group.bound_device_id = None


def make(world: dist.ProcessGroup, name: str) -> None:
    HiddenGroup(new_group(world, [0], name, dist.HashStore(), LIMIT)).destroy()


def test_no_group_is_split_from_a_default_group_with_a_device(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A split is collective over all ranks of the default group, so a group of some ranks would hang."""
    sources = []
    ask = distributed_c10d._get_split_source

    def asked(group: dist.ProcessGroup, *rest: Any) -> Any:
        sources.append(ask(group, *rest))
        return sources[-1]

    monkeypatch.setattr(distributed_c10d, "_get_split_source", asked)
    make(world, "own")
    assert sources == [], "torch would split the default group"
    dist.destroy_process_group(dist.new_group([0]))
    assert len(sources) == 1, "torch no longer splits by default: is `_unsplit` still needed?"


def test_the_default_group_keeps_its_device_if_a_group_cannot_be_made(world: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="is not in list"):
        new_group(world, [], "of no rank", dist.HashStore(), LIMIT)
    make(world, "afterwards")  # and the fixture looks at the device


def test_threads_that_make_groups_at_the_same_time_leave_the_device(
    world: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins while the first has unbound the default group, and ends after it."""
    helper = distributed_c10d._new_process_group_helper
    second_begins, first_ended = threading.Event(), threading.Event()

    def slow(*args: Any, **kwargs: Any) -> Any:
        assert world.bound_device_id is None
        if "first" in args[5]:
            assert second_begins.wait(60)
        else:
            second_begins.set()
            assert first_ended.wait(60)
        assert world.bound_device_id is None
        return helper(*args, **kwargs)

    monkeypatch.setattr(distributed_c10d, "_new_process_group_helper", slow)
    second = threading.Thread(target=make, args=(world, "second"))
    first = threading.Thread(target=make, args=(world, "first"))
    first.start()
    second.start()
    first.join()
    first_ended.set()
    second.join()


class Backend:
    """What a third party's backend has of torch's: no options."""


def group_of(*backends: object) -> Any:
    devices = [torch.device("cuda"), torch.device("cpu")][: len(backends)]
    known = dict(zip(devices, backends, strict=True))
    return SimpleNamespace(_device_types=devices, _get_backend=lambda device: known[device])


def test_a_backend_without_options_has_the_time_limit_of_another_or_torchs_own() -> None:
    gloo: Any = Backend()
    gloo.options = SimpleNamespace(_timeout=LIMIT)
    slower: Any = Backend()
    slower.options = SimpleNamespace(_timeout=2 * LIMIT)
    assert time_limit(group_of(Backend(), gloo)) == LIMIT
    assert time_limit(group_of(gloo, Backend())) == LIMIT
    assert time_limit(group_of(gloo, slower)) == time_limit(group_of(slower, gloo)) == LIMIT
    assert time_limit(group_of(Backend())) == distributed_c10d.default_pg_timeout
