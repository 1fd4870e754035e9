"""The walk lists what a checkout contains, as git would, and nothing stops it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repopages.errors import OptionError
from repopages.reading.repository import Repository


def write(root: Path, *paths: str, text: str = "x\n") -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_files_are_listed_sorted_without_caches_and_environments(tmp_path: Path) -> None:
    write(
        tmp_path, "b.py", "a/ü ä#?.md", ".git/config", "a/__pycache__/b.pyc", "env/pyvenv.cfg", "env/lib.py"
    )
    write(tmp_path, "made/CACHEDIR.TAG", "made/big", ".github/ci.yml", "node_modules/x/index.js")
    assert Repository.open(str(tmp_path)).files == [".github/ci.yml", "a/ü ä#?.md", "b.py"]


def test_ignored_files_are_those_that_git_ignores(tmp_path: Path) -> None:
    git = shutil.which("git")
    if git is None:
        pytest.skip("compares with git")
    write(
        tmp_path,
        "keep.py",
        "a.log",
        "build/x",
        "src/build/y",
        "src/deep/a.log",
        "src/deep/keep.log",
        "docs/a/b.txt",
    )
    write(
        tmp_path,
        "docs/a/c.md",
        "only/a.py",
        "only/b.txt",
        "only/in/c.py",
        "only/in/d.txt",
        "sp ace/a b.tmp",
        "#x",
    )
    (tmp_path / ".gitignore").write_text(
        "*.log\n/build/\n[z-a]\n!\n\\\ndocs/**/*.txt\n*.tmp \n\\#x\n# comment\n"
    )
    (tmp_path / "src/deep/.gitignore").write_text("!keep.log\n")
    (tmp_path / "only/.gitignore").write_bytes(b"*\n!*/\n!*.py\n\xff\xfe*\n")
    subprocess.run([git, "init", "-q", str(tmp_path)], check=True)
    listed = subprocess.run(
        [git, "-C", str(tmp_path), "ls-files", "-z", "--others", "--exclude-standard"],
        check=True,
        capture_output=True,
    )
    expected = sorted(name for name in os.fsdecode(listed.stdout).split("\0") if name)
    assert Repository.open(str(tmp_path)).files == expected


def test_a_folder_in_a_checkout_obeys_the_rules_above_it_unless_they_ignore_itself(tmp_path: Path) -> None:
    write(tmp_path, "src/pkg/a.py", "src/pkg/b.log", ".venv/pkg/c.py", ".venv/pkg/d.log", ".git/HEAD")
    (tmp_path / ".gitignore").write_text("*.log\n.venv/\n")
    assert Repository.open(str(tmp_path / "src")).files == ["pkg/a.py"]
    assert Repository.open(str(tmp_path / ".venv" / "pkg")).files == ["c.py", "d.log"]


def test_a_hostile_pattern_takes_no_time(tmp_path: Path) -> None:
    write(tmp_path, "a" * 200)
    (tmp_path / ".gitignore").write_text("*a*a*a*a*a*a*a*a*a*a*a*b\n" + "/".join(["**/a"] * 30))
    assert "a" * 200 in Repository.open(str(tmp_path)).files


def test_patterns_of_the_options_choose(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "b.md", "src/c.py", "src/old/d.py")
    opened = Repository.open(str(tmp_path), include=["*.py"], exclude=["old/"])
    assert opened.files == ["a.py", "src/c.py"]
    with pytest.raises(OptionError, match="--include"):
        Repository.open(str(tmp_path), include=["!"])


def test_links_are_listed_and_never_followed(tmp_path: Path) -> None:
    write(tmp_path, "a/x.py")
    (tmp_path / "a/loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "out").symlink_to("/etc")
    assert Repository.open(str(tmp_path)).files == ["a/loop", "a/x.py", "out"]


def test_a_folder_that_cannot_be_read_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.py", "locked/b.py")
    real = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    opened = Repository.open(str(tmp_path))
    assert opened.files == ["a.py"]
    assert opened.warnings == ("locked: this folder cannot be read: Permission denied",)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not store such names")
def test_names_that_are_no_text_and_very_deep_folders(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\n.py")).write_text("x = 1\n")
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        for _ in range(1200):  # deeper than Python's stack, and longer than a path may be
            os.mkdir("deep")
            os.chdir("deep")
    finally:
        os.chdir(here)
    opened = Repository.open(str(tmp_path))
    assert opened.files == ["\udcff\n.py"]
    assert len(opened.warnings) == 1
    assert "File name too long" in opened.warnings[0]
    subprocess.run(["rm", "-rf", str(tmp_path / "deep")], check=True)


def test_the_package_around_a_folder_is_known(tmp_path: Path) -> None:
    write(tmp_path, "site/torch/__init__.py", "site/torch/dist/__init__.py", "site/torch/dist/plain/a.py")
    assert Repository.open(str(tmp_path / "site")).prefix == ""
    assert Repository.open(str(tmp_path / "site/torch/dist")).prefix == "torch.dist"
    assert Repository.open(str(tmp_path / "site/torch/dist/plain")).prefix == "torch.dist.plain"
    single = Repository.open(str(tmp_path / "site/torch/dist/plain/a.py"))
    assert (single.name, single.files) == ("a.py", ["a.py"])


def test_installed_packages_are_found_without_importing_them() -> None:
    found = Repository.open("wsgiref.simple_server")
    assert found.files == ["simple_server.py"]
    assert found.prefix == "wsgiref"
    assert "types.py" in Repository.open("wsgiref").files
    assert "wsgiref" not in sys.modules
    for wrong in ("no.such.package", "math", "a\0b", "x" * 5000, "../nowhere"):
        with pytest.raises(OptionError, match="path="):
            Repository.open(wrong)
