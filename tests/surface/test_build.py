"""The package ships all sources of its kernels, builds without a compiler, and pins what it installs."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import thinwire

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src" / "thinwire" / "kernels"


def build(what: str, out: Path, **environment: str) -> Path:
    """Build a distribution with the backend of this environment, as pip does without isolation."""
    program = f"from setuptools import build_meta; print(build_meta.build_{what}({str(out)!r}))"
    run = subprocess.run(
        [sys.executable, "-c", program],
        cwd=out.parent / "checkout",
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return out / run.stdout.splitlines()[-1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a folder for distributions, beside a clean copy of what is built."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (copy / name).write_bytes((ROOT / name).read_bytes())
    for path in (ROOT / "src").rglob("*"):
        if path.suffix in (".py", ".c", ".h", ".typed", ".html"):
            target = copy / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (tmp_path / "dist").mkdir()
    return tmp_path / "dist"


def test_the_source_distribution_has_every_source(checkout: Path) -> None:
    with tarfile.open(build("sdist", checkout)) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {path.name for path in KERNELS.glob("*.[ch]")} <= names


def test_without_a_compiler_the_package_is_built_without_kernels(checkout: Path) -> None:
    with zipfile.ZipFile(build("wheel", checkout, CC="no-such-compiler")) as archive:
        names = archive.namelist()
    assert {"thinwire/kernels/blocks.py", "thinwire/py.typed", "thinwire_command.py"} <= set(names)
    assert not [name for name in names if name.endswith(".so")]


def _installed(name: str, extras: set[str], found: dict[str, set[str]]) -> None:
    """Collect an installed distribution and all that it requires, as pip walks them."""
    if not extras - found.get(name, set()) and name in found:
        return
    found.setdefault(name, set()).update(extras)
    try:
        requires = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return  # of an extra that is not installed
    for text in requires:
        one = Requirement(text)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in {"", *extras}):
            _installed(canonicalize_name(one.name), set(one.extras), found)


def test_everything_that_is_installed_has_a_pinned_version() -> None:
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), flags=re.M)
    needed: dict[str, set[str]] = {}
    for package, extra in (("thinwire", "dev"), ("repopages", "test")):
        _installed(package, {extra}, needed)
    assert len(needed) > 50, "the walk found too few packages"
    unpinned = needed.keys() - set(map(canonicalize_name, pins)) - {"thinwire", "repopages"}
    assert not unpinned, f"run `make constraints`: {sorted(unpinned)} have no version in constraints.txt"


def test_the_changelog_and_the_citation_have_the_version() -> None:
    version = thinwire.__version__
    newest = re.search(
        r"^## \[(.*?)\] - (unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    assert newest is not None
    assert newest[1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_the_tools_outside_the_environment_have_its_versions() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints.in").read_text(), flags=re.M))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert f"ruff-pre-commit\n    rev: v{pins['ruff']} " in hooks
    assert f"twine=={pins['twine']}\n" in (ROOT / ".github/workflows/wheels.yml").read_text()
