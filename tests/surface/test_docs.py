"""What the documentation shows is run here."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import thinwire
from thinwire.testing import check_codec
from thinwire.wire.simulate import simulate

ROOT = Path(__file__).parents[2]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def test_the_sparse_example_loses_nothing() -> None:
    names: dict[str, Any] = {}
    exec(python_blocks("docs/programs.md")[0], names)
    program = names["Sparse"](k=3)
    with pytest.raises(thinwire.OptionError, match="k=0 must be at least 1"):
        names["Sparse"](k=0)
    world_size, shapes = 4, (torch.Size((2, 5)), torch.Size((3,)))
    memories = [thinwire.Memory() for _ in range(world_size)]
    given, received = torch.zeros(13), torch.zeros(13)
    for step in range(9):
        gradients = torch.randn(world_size, 13)
        given += gradients.mean(0)
        buckets = [
            thinwire.Bucket(0, own.clone(), ("w", "b"), shapes, rank, world_size, step)
            for rank, own in enumerate(gradients)
        ]
        run = simulate([[program(b, m)] for b, m in zip(buckets, memories, strict=True)])
        means = [result[0].mean for result in run.results]
        assert all(torch.equal(mean, means[0]) for mean in means)
        received += means[0]
    kept = [torch.cat([m.slot(n, "residual", lambda: torch.zeros(0)) for n in ("w", "b")]) for m in memories]
    torch.testing.assert_close(received + torch.stack(kept).mean(0), given)


def test_the_new_codec_passes_the_battery_in_less_than_sixty_lines() -> None:
    block = python_blocks("CONTRIBUTING.md")[0]
    assert len(block.splitlines()) < 60
    names: dict[str, Any] = {"__name__": "ternary"}
    exec(block, names)
    check_codec(names["Ternary"]())


def test_the_simulation_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    block = python_blocks("docs/programs.md")[1]
    exec(block, {"torch": torch, "thinwire": thinwire})
    assert capsys.readouterr().out == "tensor([3.5000, 3.5000, 3.5000, 3.5000, 3.5000, 3.5000])\n"


def test_the_readmes_own_program_is_the_examples() -> None:
    """It is shown in the README without types; the example, which is type-checked, has the same lines."""
    block = next(block for block in python_blocks("README.md") if "class TwoShotMean" in block)
    example = (ROOT / "examples/timeline.py").read_text()
    for line in re.findall(r"        (?:world_size|padded|own|slices|return).*", block):
        assert line in example


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", *map(str, (ROOT / "docs").rglob("*.md"))])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), f"{page} links to {target}"
