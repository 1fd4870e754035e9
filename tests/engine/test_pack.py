"""Tensors packed into one buffer, and views of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thinwire.engine.pack import Layout, changed_layout, pack, unpack

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=6)


@given(shapes)
def test_unpack_undoes_pack(shapes: list[list[int]]) -> None:
    tensors = [torch.randn(shape) for shape in shapes]
    for before, after in zip(tensors, unpack(pack(tensors), shapes), strict=True):
        assert torch.equal(before, after)


def test_unpack_gives_views() -> None:
    flat = torch.zeros(4)
    unpack(flat, [(2,), (1, 2)])[1].fill_(1)
    assert flat.tolist() == [0, 0, 1, 1]


def test_shapes_must_cover_the_buffer() -> None:
    with pytest.raises(RuntimeError):
        unpack(torch.zeros(4), [(2,)])


def test_an_encoding_on_another_device_is_named() -> None:
    expected, found = (Layout.of((torch.empty(0, device=device),)) for device in ("meta", "cpu"))
    assert "numbers on meta to tensors on cpu" in str(changed_layout(expected, found))
    assert "changed from (0,) float32 to (3,) float32" in str(
        changed_layout(found, Layout.of((torch.ones(3),)))
    )
