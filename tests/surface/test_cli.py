"""The command line: help, errors in one line, exit codes, data on stdout."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import thinwire
from thinwire import UnavailableError
from thinwire.bench.grid import Grid
from thinwire.bench.results import Results
from thinwire.cli import bench as bench_command
from thinwire.cli.main import cli
from thinwire.lab import checks, namespaces


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


@pytest.mark.parametrize("command", ["", "lab", "bench", "report", "doctor"])
def test_every_command_has_help(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "--help" in result.output


def test_the_module_and_the_script_are_the_same() -> None:
    for command in ([sys.executable, "-m", "thinwire"], [str(Path(sys.executable).parent / "thinwire")]):
        shown = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
        assert shown == f"thinwire, version {thinwire.__version__}\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("lab --hosts 0 -- true", 2, "hosts=0 must be from 1 to 64"),
        ("lab --rate quick -- true", 2, "rate='quick' does not parse"),
        ("lab --hosts 2", 2, "there is no command to run"),
        ("lab --hosts two -- true", 2, "'two' is not a valid integer"),
        ("bench --programs zip", 2, "program='zip' is unknown: choose from Exact"),
        ("bench --hosts 1", 2, "hosts=1 must be from 2"),
        ("bench --hosts a,b", 2, "hosts='a' is not a whole number"),
        ("bench --out /no/such/folder/b.json", 2, "folder that does not exist"),
        ("report /no/such/file.json", 1, "cannot be read"),
        ("report pyproject.toml", 1, "is no results file"),
        ("report pyproject.toml", 1, "no training log of telemetry.JsonLines either"),
        ("report /no/such/steps.jsonl", 1, "cannot be read"),
        ("nonsense", 2, "No such command"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(words: str, code: int, message: str) -> None:
    result = run(*words.split())
    assert result.exit_code == code
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("Error: ")


def test_a_training_log_becomes_a_page_beside_it(tmp_path: Path) -> None:
    times = {"compute_seconds": None, "wire_seconds": None, "exposed_seconds": None}
    row = {"step": 0, "purpose": "gradients", "bytes_sent": 5, **times, "collectives": 1}
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps(row) + '\n{"step": 1, "pur')
    result = run("report", str(path))
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "steps.html")
    assert "the last line is cut off" in result.stderr
    assert "1 step sent 5 B in total" in (tmp_path / "steps.html").read_text()
    as_json = json.loads(run("report", str(path), "--json").stdout)
    assert as_json["path"] == str(tmp_path / "steps.html")


def test_a_damaged_training_log_is_one_line_and_no_page(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"step": 0, "pur\n{}\n')
    result = run("report", str(path))
    assert result.exit_code == 1
    assert "damaged in line 1" in result.stderr
    assert not (tmp_path / "steps.html").exists()


def no_way(*args: object) -> Any:
    raise UnavailableError("the lab needs the command 'ip', which is not installed: apt-get install iproute2")


def test_without_a_lab_the_commands_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (namespaces, checks, bench_command):
        monkeypatch.setattr(module, "way_in", no_way)
    for words in ("lab -- true", "bench --steps 8"):
        result = run(*words.split())
        assert result.exit_code == 3
        assert "apt-get install iproute2" in result.stderr
    result = run("doctor")
    assert result.exit_code == 1
    assert "apt-get install iproute2" in result.stdout.replace("\n", " ").replace("  ", " ")


def test_the_demo_falls_back_to_loopback_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, ...]] = []

    def no_run(grid: Grid, *args: object, **options: object) -> Results:
        asked.append(grid.links)
        return Results("", {}, {})

    monkeypatch.setattr(bench_command, "way_in", no_way)
    monkeypatch.setattr(bench_command, "run_grid", no_run)
    result = run("bench", "--or-loopback", "--links", "10mbit", "--out", str(tmp_path / "b.json"))
    assert result.exit_code == 0
    assert asked == [("loopback",)]
    assert "apt-get install iproute2" in result.stderr


def test_the_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool, path: None if tool == "tc" else f"/bin/{tool}")
    with pytest.raises(UnavailableError, match="'tc', which is not installed: apt-get install iproute2"):
        namespaces.way_in()


def test_doctor_as_json() -> None:
    findings = {finding["name"]: finding for finding in json.loads(run("doctor", "--json").stdout)}
    assert findings["thinwire"]["detail"] == thinwire.__version__
    assert findings["gloo"]["ok"] is True
    assert all(finding["ok"] or finding["remedy"] for finding in findings.values())


def test_without_click_the_way_to_get_it_is_said() -> None:
    script = "import sys; sys.modules['click'] = None; from thinwire.__main__ import main; main()"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert process.returncode == 1
    assert process.stderr == "thinwire's command line needs click: pip install 'thinwire[cli]'\n"


def test_nothing_to_clean_is_not_an_error() -> None:
    assert json.loads(run("lab", "--clean", "--json").stdout) == {"removed": 0}
