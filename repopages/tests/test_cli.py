"""The command: data on stdout, everything else on stderr, and errors with a way out."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from repopages.cli import main
from shop_checkout import write_checkout

import repopages


def run(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    write_checkout(tmp_path / "checkout")
    return tmp_path / "checkout"


def test_find_prints_entries(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    result = run("find", "sell")
    assert result.exit_code == 0, result.output
    assert re.search(
        r"^sell  function  src/shop/_till\.py#sell\n    Sell one thing\.$", result.stdout, flags=re.M
    )
    found = json.loads(run("find", "infusion", ".", "--json").stdout)
    assert "docs/glossary.md" in {entry["path"] for entry in found}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["find"], "Missing argument 'KEYWORD'"),
        (["find", " ", "json"], "keyword=' ' is not in the index"),
        (
            ["find", "no-such-word", "json"],
            "keyword='no-such-word' is not in the index of json: try a part of it",
        ),
        (["find", "x", "no_such_package"], "path='no_such_package' is not a folder"),
        (["build", "json", "--format", "pdf"], "'pdf' is not one of 'site', 'markdown'"),
        (["build", "json", "--jobs", "0"], "0 is not in the range"),
        (["build", "json", "--include", "*.nothing"], "has no files to document"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(words: list[str], line: str) -> None:
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert line in result.stderr
    assert result.stdout == ""


def test_markdown_is_written_and_leaves_itself_out(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout)
    for _ in range(2):
        result = run("build", ".", "--format", "markdown", "--out", "pages", "--json")
        assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["written"] == []
    assert (checkout / "pages/src/shop/_till.py_docs.md").exists()
    assert not list((checkout / "pages").rglob("*_docs.md_docs.md"))
    assert "(../../../src/shop/_till.py#L4)" in (checkout / "pages/src/shop/_till.py_docs.md").read_text()


def test_the_repository_itself_is_not_the_result(checkout: Path) -> None:
    result = run("build", str(checkout), "--out", str(checkout))
    assert result.exit_code == 2
    assert "is the repository itself: pass another folder" in result.stderr


def test_strict_fails_after_a_link_that_leads_nowhere(checkout: Path, tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    (checkout / "README.md").write_text(
        "# The shop\n\n[nowhere](nowhere.md) [no heading](docs/glossary.md#none)\n"
    )
    words = ["build", str(checkout), "--out", str(tmp_path / "site"), "--jobs", "1"]
    loose = run(*words)
    assert loose.exit_code == 0, loose.output
    assert "Links of its documents that lead nowhere: 2, which --strict lists" in loose.stderr
    assert loose.stdout == f"{tmp_path / 'site' / 'index.html'}\n"
    result = run(*words, "--strict")
    assert result.exit_code == 1
    assert "README.md:3: 'nowhere.md' is not in the repository" in result.stderr
    assert "index.html: broken link to documents/docs/glossary.html#none" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("Error: the site of ")


def test_the_module_is_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "repopages", "--version"], capture_output=True, text=True, check=True
    ).stdout
    assert shown == f"repopages, version {repopages.__version__}\n"


@pytest.mark.slow  # a process that builds twice
def test_serve_follows_the_files_and_ends_with_control_c(checkout: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "repopages", "serve", str(checkout), "--port", "0", "--jobs", "1"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        try:
            assert server.stderr is not None
            address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))
            page = f"{address}files/src/shop/goods.py_docs.html"
            assert "Tea" in urllib.request.urlopen(page).read().decode()
            (checkout / "src/shop/goods.py").write_text("class Coffee:\n    pass\n")
            for _ in range(3000):
                if "Coffee" in urllib.request.urlopen(page).read().decode():
                    break
                time.sleep(0.2)
            else:
                pytest.fail("the site did not follow the change")
            server.send_signal(signal.SIGINT)
            assert server.wait(120) == 0
        finally:
            server.kill()
