"""Every Python block of the guides runs, page by page; every example of plain torch trains."""

import contextlib
import io
import re
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from examples import own_model, tiny, train_diloco, train_zero
from tests.harness import run_ranks
from tests.models import batch, mlp
from tests.surface.test_docs import ROOT, python_blocks
from thinwire import errors

GUIDES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/guides/*.md"))


def run_page(page: str, rank: int, folder: str) -> str:
    """Run the blocks of a page one after another, and return what they printed.

    Each block has a new model, unless it goes on with the wire of the one before.
    """
    names: dict[str, Any] = {"thinwire": thinwire, "torch": torch, "folder": folder}
    names["loss_of"] = lambda output: output.square().mean()
    names["batches"] = [batch(rank, step, width=8) for step in range(4)]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(printed):
        for block in python_blocks(page):
            attaches = "attach(" in block or "register_comm_hook" in block
            if attaches or "wire" not in names:
                names["ddp"] = DDP(mlp(width=8, layers=2))
                names["optimizer"] = torch.optim.AdamW(names["ddp"].parameters())
            if not attaches and "wire" not in names:
                names["wire"] = thinwire.attach(names["ddp"], thinwire.Int8())
            exec(block, names)
            if "register_comm_hook" in block:
                for one in names["batches"]:
                    names["ddp"](one).square().mean().backward()
    return printed.getvalue()


def guided(rank: int, world_size: int, folder: str) -> dict[str, str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of checkpoints
        return {page: run_page(page, rank, folder) for page in GUIDES}


def test_every_python_block_of_the_guides_runs(tmp_path: Path) -> None:
    printed = run_ranks(guided, 2, str(tmp_path))[0]
    assert "Int8()" in printed["docs/guides/choose-a-program.md"]
    assert re.search(r"MB sent in 4 steps", printed["docs/guides/your-own-script.md"])
    assert printed["docs/guides/errors.md"].startswith("rank=0 must be at least 1")
    assert (tmp_path / "steps.jsonl").exists()
    assert (tmp_path / "audited.jsonl").exists()


def test_the_guide_to_errors_has_every_class() -> None:
    page = (ROOT / "docs/guides/errors.md").read_text()
    classes = [name for name, one in vars(errors).items() if isinstance(one, type)]
    assert [name for name in classes if f"`{name}`" not in page] == []


def test_the_guides_lead_to_each_other() -> None:
    index = (ROOT / "docs/guides/README.md").read_text()
    assert [page for page in GUIDES if f"({Path(page).name})" not in index and "README" not in page] == []


def exampled(rank: int, world_size: int, folder: str) -> str:
    dist.init_process_group = dist.destroy_process_group = lambda *args: None  # type: ignore[assignment]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("ignore")  # torch's own, of checkpoints
        train_diloco.main()
        train_zero.main(Path(folder, "checkpoint"))
    return printed.getvalue()


def test_the_examples_of_diloco_and_zero_train(tmp_path: Path) -> None:
    first, second = run_ranks(exampled, 2, str(tmp_path))
    assert "the resumed job equals the uninterrupted one: True" in first
    losses = [float(one) for one in re.findall(r"step \d+: loss (\S+)", first)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert second == ""


def test_ranks_of_the_examples_have_different_batches() -> None:
    own, others = tiny.batches(4, 0, 2), tiny.batches(4, 1, 2)
    assert own.shape == others.shape == (4, 8, tiny.WIDTH)
    assert not (own == others).any()


EXAMPLE = (ROOT / "examples/train.py").read_text()


def loop_of_the_readme() -> str:
    (block,) = python_blocks("README.md")
    return block


def test_the_readme_shows_the_minimal_example() -> None:
    imports, body = EXAMPLE.split("def main() -> None:")
    body = body.split('"""\n')[1].split("\n\nif __name__")[0]
    shown = f"{imports.split(chr(34) * 3)[2].strip()}\n\n{textwrap.dedent(body).strip()}\n"
    assert loop_of_the_readme() == shown
    assert len(EXAMPLE.splitlines()) <= 40


@pytest.mark.slow  # torchrun, twice
def test_the_minimal_example_trains_and_resumes_as_it_says(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for steps in (50, 10):
        run = subprocess.run(
            [*torchrun, str(ROOT / "examples/train.py")],
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
            cwd=tmp_path,
        )
        assert run.returncode == 0, run.stderr
        assert re.search(rf"loss 0\.\d+; {steps} steps: ", run.stdout), run.stdout


PROGRAMS = (
    "Exact()",
    "PowerSGD(rank=2)",
    "ZeRO(thinwire.Int8())",
    "LocalSGD(7)",
    "DiLoCo(period=8, program=thinwire.Int4())",
    "Schedule({0: thinwire.Int8(), 30: thinwire.LocalSGD(4)})",
)


def looped(rank: int, world_size: int, folder: str) -> list[list[torch.Tensor]]:
    """Train with the README's loop, once with each program, and return the parameters."""
    dist.init_process_group = dist.destroy_process_group = lambda *args: None  # type: ignore[assignment]
    found = []
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # torch's own, of checkpoints
        for number, program in enumerate(PROGRAMS):
            text = loop_of_the_readme().replace('"checkpoint"', repr(f"{folder}/{number}"))
            names: dict[str, Any] = {}
            exec(text.replace("Int8()", program), names)
            found.append([one.detach() for one in names["ddp"].parameters()])
    return found


def test_the_loop_of_the_readme_suits_every_program(tmp_path: Path) -> None:
    first, second = run_ranks(looped, 2, str(tmp_path))
    for program, one, other in zip(PROGRAMS, first, second, strict=True):
        assert all(map(torch.equal, one, other)), program


def test_the_own_model_is_one_that_bench_takes() -> None:
    model, batches = own_model.build()
    loss = model(batches(0, 0))
    loss.backward()
    assert torch.equal(batches(1, 5)[0], batches(1, 5)[0])
