"""The pages of the frameworks show what runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import tiny
from tests.integrations.frameworks import on_ranks
from tests.surface.test_docs import ROOT, python_blocks

PACKAGES = {"fabric": "lightning"}
"""The packages that are not named as their page."""


def shown(page: str) -> Any:
    """The function `train` of a page."""
    names: dict[str, Any] = {}
    for block in python_blocks(f"docs/integrations/{page}.md"):
        exec(block, names)
    return names["train"]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def accelerate(rank: int, folder: Path) -> Any:
    from accelerate import Accelerator

    model, data = tiny.model(), torch.utils.data.DataLoader(tiny.Rows(32), batch_size=4)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    wire = shown("accelerate")(accelerator, model, optimizer, data, loss_of, str(folder))
    assert (folder / "custom_checkpoint_0.pkl").exists()
    return wire.step


def transformers(rank: int, folder: Path) -> Any:
    from examples import train_transformers

    args = train_transformers.arguments(tiny.Options(steps=2, folder=folder))
    rows = [{"rows": row} for row in tiny.Rows(32).rows]
    return shown("transformers")(train_transformers.WithLoss(), args, rows).step


def lightning(rank: int, folder: Path) -> Any:
    from examples import train_lightning

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    more: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "max_steps": 2, **quiet}
    return shown("lightning")(train_lightning.Module(), **more).step


def fabric(rank: int, folder: Path) -> Any:
    from lightning.fabric import Fabric

    one = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    one.launch()
    steps = 0
    for resume in (False, True):
        model = tiny.model()
        optimizer = torch.optim.AdamW(model.parameters())
        batches = [tiny.Rows().rows[:8]]
        steps = shown("fabric")(one, model, optimizer, batches, loss_of, folder / "a", resume=resume).step
    return steps


PAGES = [accelerate, transformers, lightning, fabric]


@pytest.mark.parametrize("page", PAGES, ids=lambda one: one.__name__)
def test_the_page_shows_what_trains(page: Any, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(page.__name__, page.__name__))
    assert on_ranks(page, 2, tmp_path) == [2, 2]


# `test_ray.py` runs the page of Ray, and `test_torchft.py` that of torchft.

VERSIONS = re.findall(r"^([a-z-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("page", sorted((ROOT / "docs/integrations").glob("*.md")), ids=lambda one: one.stem)
def test_the_versions_that_a_page_names_are_those_of_constraints(page: Path) -> None:
    pinned = dict(VERSIONS)
    named = re.findall(r"\b([a-z-]+) (\d+\.\d+(?:\.\d+)?)\b", page.read_text())
    assert [(name, version) for name, version in named if name in pinned], (
        "a page says what it was tested with"
    )
    assert [(name, version) for name, version in named if pinned.get(name, version) != version] == []
