"""The host side of the Triton kernels, which needs no GPU and no Triton."""

import subprocess
import sys

import pytest
import torch

from thinwire.errors import OptionError
from thinwire.kernels import library
from thinwire.kernels.triton import launch


def test_importing_thinwire_does_not_import_triton() -> None:
    check = "import sys, thinwire, thinwire.kernels.triton.launch; sys.exit('triton' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_kernels_are_not_available_on_a_cpu() -> None:
    assert not launch.available(torch.device("cpu"))


def test_kernels_are_switched_off_with_the_native_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installed", lambda: True)
    gpu = torch.device("cuda", 0)
    assert launch.available(gpu)
    with library.switched_off():
        assert not launch.available(gpu)
    monkeypatch.setenv(library.VARIABLE, "0")
    assert launch.status() == (False, "switched off by THINWIRE_KERNELS=0", "unset THINWIRE_KERNELS")
    monkeypatch.undo()
    monkeypatch.setattr(launch, "_installed", lambda: False)
    assert "many launches" in launch.status().detail


@pytest.mark.parametrize(
    ("kind", "width", "supported"),
    [
        ("int8", 8, True),
        ("int8", 1016, True),
        ("int8", 4096, True),
        ("int8", 4104, False),
        ("int8", 12, False),
        ("int4", 136, True),
        ("e4m3", 0, False),
        ("sign", 256, True),
        ("sign", 248, False),
        ("int2", 128, True),
        ("int2", 120, False),
        ("int3", 128, False),
    ],
)
def test_supported_widths(kind: str, width: int, supported: bool) -> None:
    assert launch.supports(kind, width) is supported


def test_a_geometry_that_kernels_cannot_read_is_rejected() -> None:
    layout = {"row_bytes": 4096, "codes_offset": 64, "exact_offset": 2048}
    with pytest.raises(OptionError, match=r"width=136 has no Triton kernel"):
        launch.Geometry(kind="sign", width=136, blocks=4, exact=0, **layout)
    with pytest.raises(OptionError, match=r"codes_offset=20 must be a multiple of 8"):
        launch.Geometry(kind="int8", width=128, blocks=4, exact=0, **{**layout, "codes_offset": 20})


def test_more_ranks_than_the_stack_of_sums_holds_are_rejected() -> None:
    geometry = launch.Geometry(
        kind="int8", width=8, blocks=0, row_bytes=8, codes_offset=8, exact_offset=8, exact=0
    )
    row = torch.empty(8, dtype=torch.uint8)
    pytest.importorskip("triton", reason="needs Triton")
    with pytest.raises(OptionError, match="world=513 must be from 1 to 512"):
        launch.mean_exact(geometry, torch.float32, row.view(1, 8), row, 0, 513, row)
