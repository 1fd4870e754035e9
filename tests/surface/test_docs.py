"""What the documentation shows is run here."""

import contextlib
import io
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire
from tests.harness import run_ranks
from tests.models import batch, flat_parameters, mlp
from thinwire.engine.simulate import simulate
from thinwire.telemetry.log import Log
from thinwire.testing import check_codec
from thinwire.tools.bench.workloads import GPT
from thinwire.tools.report.training import notes
from thinwire.tools.report.training_summary import summarise

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
    kept = [
        torch.cat([m.slot(n, "residual", lambda: torch.zeros(0)).flatten() for n in ("w", "b")])
        for m in memories
    ]
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


def checkpointed(rank: int, world_size: int, folder: str) -> None:
    names: dict[str, Any] = {}
    for block in python_blocks("docs/checkpoints.md"):
        exec(block, names)

    def job() -> tuple[Any, Any, Any]:
        ddp = DDP(mlp(width=8, layers=2))
        optimizer = torch.optim.AdamW(ddp.parameters())
        wire = thinwire.attach(ddp, thinwire.LocalSGD(4), optimizer=optimizer)
        return ddp, optimizer, wire

    def train(job: tuple[Any, Any, Any], begin: int, end: int) -> torch.Tensor:
        ddp, optimizer, _ = job
        for step in range(begin, end):
            optimizer.zero_grad()
            ddp(batch(rank, step, width=8)).square().mean().backward()
            optimizer.step()
        return flat_parameters(ddp.module)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of checkpoints
        saved = job()
        scheduler = torch.optim.lr_scheduler.StepLR(saved[1], 1)
        train(saved, 0, 3)
        names["save_all"](f"{folder}/all", *saved, scheduler, 3)
        names["save"](folder, *saved)
        names["save_file"](f"{folder}/file.pt", *saved)
        names["save_together"](f"{folder}/together", *saved)
        later = names["save_meanwhile"](f"{folder}/meanwhile", *saved)
        expected = train(saved, 3, 6)
        later.result()
        for load, place in (
            ("load", folder),
            ("load_file", f"{folder}/file.pt"),
            ("load_together", f"{folder}/together"),
            ("load_together", f"{folder}/meanwhile"),
            ("load_anyhow", f"{folder}/together"),
        ):
            again = job()
            names[load](place, *again)
            assert torch.equal(train(again, 3, 6), expected), (load, place)
        again = job()
        assert names["load_all"](f"{folder}/all", *again, scheduler) == 3
        assert torch.equal(train(again, 3, 6), expected)
        again = job()
        names["load_files_anyhow"](folder, world_size, *again)
        assert again[2].step == 3


def test_the_checkpoint_examples_bring_every_rank_back(tmp_path: Path) -> None:
    assert run_ranks(checkpointed, 2, str(tmp_path)) == [None, None]


def integrated(rank: int, world_size: int) -> None:
    names: dict[str, Any] = {}
    for page in ("README", "torch_compile"):
        (block,) = python_blocks(f"docs/integrations/{page}.md")
        exec(block, names)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        batches = [batch(rank, step, width=8) for step in range(3)]
        names["train"](mlp(width=8, layers=2), batches, lambda output: output.square().mean())
    assert re.fullmatch(
        r"3 steps: \S+ MB sent, \S+ x \w+ than plain DDP, exposed \S+ s\n", printed.getvalue()
    )
    torch.compiler.set_stance("force_eager")
    for how in ("compiled_around", "compiled_inside", "replicated"):
        model, wire = names[how](mlp(width=8, layers=2))
        model(batch(rank, 0, width=8)).square().mean().backward()
        assert wire.step == 1, how


def test_the_examples_of_plain_loops_compile_and_replicate_train() -> None:
    run_ranks(integrated, 2)


def trusted(rank: int, world_size: int) -> str:
    names: dict[str, Any] = {}
    for block in python_blocks("docs/trust.md"):
        exec(block, names)

    def trained(how: str, *extra: Any) -> Any:
        norm = torch.nn.LayerNorm(8)
        ddp = DDP(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), norm))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        result = names[how](ddp, optimizer) if extra else names[how](ddp)
        for step in range(100 if how == "attach_with_audits" else 2):
            optimizer.zero_grad()
            ddp(batch(rank, step, width=8)).square().mean().backward()
            optimizer.step()
        return result

    for how in ("attach_with_scaler", "attach_by_schedule"):
        trained(how, "optimizer")
    assert names["worst"](trained("attach_without_scaler", "optimizer")) is None, "before the first audit"
    name, error, all_errors, residual = names["worst"](trained("attach_with_audits"))
    assert name in ("0.weight", "1.weight")
    assert 0 < all_errors <= error
    assert residual > 0
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        trained("attach_with_rules")
        block = next(block for block in python_blocks("docs/features.md") if "rules = " in block)
        ddp = DDP(GPT(width=8, layers=1))
        optimizer = torch.optim.SGD(ddp.parameters())
        exec(block, {"thinwire": thinwire, "ddp": ddp, "optimizer": optimizer})
    return printed.getvalue()


def test_the_examples_of_trust_and_the_rules_of_the_features_do_what_they_say() -> None:
    for text in run_ranks(trusted, 2):
        assert "rule '*.weight'" in text
        assert "below 64 numbers" in text
        assert "rule 'token.*'" in text


def logged(rank: int, world_size: int, folder: str) -> None:
    def train(ddp: Any) -> None:
        for step in range(20):
            ddp(batch(rank, step, width=8)).square().mean().backward()

    os.chdir(folder)
    block = next(block for block in python_blocks("docs/lab.md") if "telemetry.watch" in block)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        exec(block, {"thinwire": thinwire, "ddp": DDP(mlp(width=8, layers=2)), "train": train})
    assert len(printed.getvalue().splitlines()) == (0 if rank else 2)


def test_the_telemetry_example_on_two_ranks_logs_one_clean_run(tmp_path: Path) -> None:
    run_ranks(logged, 2, str(tmp_path))
    log = Log.load(tmp_path / "steps.jsonl")
    summary = summarise(log)
    assert list(log.series["gradients"].steps) == list(range(20))
    assert (log.rank, log.world_size, summary.overflows, list(notes(log, summary))) == (0, 2, 0, [])


def test_the_own_program_of_the_features_is_the_examples() -> None:
    """It is shown without types; the example, which is type-checked, has the same lines."""
    block = next(block for block in python_blocks("docs/features.md") if "class TwoShotMean" in block)
    example = (ROOT / "examples/timeline.py").read_text()
    for line in re.findall(r"        (?:world_size|padded|own|slices|return).*", block):
        assert line in example


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "repopages/README.md", *map(str, (ROOT / "docs").rglob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), f"{page} links to {target}"


def test_every_claim_of_security_names_a_test_that_exists() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    for file, name in re.findall(r"`((?:repopages/)?tests/[\w/]+\.py)::(\w+)`", page):
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), flags=re.M), f"{file} has no {name}"
    claims = re.findall(
        r"^- .*?(?=^- |^$)", page.partition("## What it does not trust")[2], flags=re.M | re.S
    )
    assert len(claims) >= 4
    for claim in claims:
        assert re.search(r"`(?:repopages/)?tests/[\w/]+\.py::test_\w+`", claim), f"without a test: {claim}"


def test_the_readme_leads_to_every_page() -> None:
    root = Path(__file__).parents[2]
    footer = (root / "README.md").read_text().rstrip().splitlines()[-1]
    missing = []
    for path in (root / "docs").rglob("*.md"):
        index = path.with_name("README.md")  # a folder's own page leads to the others in it
        inside = index.exists() and f"({path.name})" in index.read_text()
        if not inside and f"({path.relative_to(root).as_posix()})" not in footer:
            missing.append(path.name)
    assert missing == []
