"""The command line: help, errors in one line, exit codes, data on stdout."""

import errno
import functools
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import thinwire
from tests.checkpoint.test_untrusted import Hostile
from tests.tools.bench import test_summary as summary
from thinwire import UnavailableError
from thinwire.tools.bench import load
from thinwire.tools.bench.grid import Grid
from thinwire.tools.bench.results import Results
from thinwire.tools.cli import bench as bench_command
from thinwire.tools.cli import doctor as doctor_command
from thinwire.tools.lab import namespaces
from thinwire_command import cli


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, list(words))


COMMANDS = ["bench", "doctor", "lab", "plan", "report"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    assert "--help" in result.output
    assert "\b" not in result.output
    examples = result.output.partition("Try:")[2].partition("Options:")[0].split("\n")
    assert all(re.match(r"    (thinwire|torchrun) ", line) for line in examples if line.strip())


def test_help_lists_every_command_without_importing_torch() -> None:
    script = (
        "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, 'rich' in sys.modules))"
    )
    script += "; from thinwire_command import main; sys.argv = ['thinwire', '--help']; main()"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.endswith("\nFalse False\n")
    listed = re.findall(r"^  (\w+)  +[A-Z]", shown.partition("Commands:")[2], flags=re.M)
    assert set(COMMANDS) <= set(listed)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_documented_completion_works(shell: str) -> None:
    program = str(Path(sys.executable).parent / "thinwire")
    environment = os.environ | {"_THINWIRE_COMPLETE": f"{shell}_source"}
    shown = subprocess.run([program], env=environment, capture_output=True, text=True, check=False).stdout
    assert "_THINWIRE_COMPLETE" in shown
    assert f"_THINWIRE_COMPLETE={shell}_source" in (Path(__file__).parents[2] / "docs/lab.md").read_text()


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
        ("report pyproject.toml", 1, "is not a results file"),
        ("report pyproject.toml", 1, "nor a training log of telemetry.JsonLines"),
        ("report /no/such/steps.jsonl", 1, "cannot be read"),
        ("plan --model gpt-1m --hosts 0 --link 1gbit", 2, "hosts=0 must be from 2"),
        ("plan --model gpt-1m --hosts many --link 1gbit", 2, "hosts='many' does not parse"),
        ("plan --model gpt-1m --hosts 2 --link 0mbit", 2, "link='0mbit' must be above 0"),
        ("plan --model gpt-1m --hosts 2 --link 10furlongs", 2, "link='10furlongs' does not parse"),
        ("plan --model gpt-1m --hosts 2 --up 1gbit", 2, "pass --link 100mbit"),
        ("plan --model gpt-1m --hosts 2 --link 1gbit --rtt 20", 2, "rtt='20' does not parse"),
        ("plan --model gpt-1m --hosts 2 --link 1gbit --max-gap some", 2, "max-gap='some' does not parse"),
        ("plan --model no_such.module:build --hosts 2 --link 1gbit", 2, "ModuleNotFoundError"),
        ("plan --hosts 2 --link 1gbit", 2, "pass either --model"),
        ("plan --parameters 7e9 --hosts 2 --link 1gbit", 2, "parameters needs --compute"),
        ("plan --model gpt-1m --hosts 2 --link 1gbit --compute 0s", 2, "compute='0s' must be above 0"),
        ("plan --model gpt-1m --hosts 2 --link 1gbit --programs ZeRO", 2, "cannot be planned"),
        ("plan --model gpt-1m --hosts 2 --link 1gbit --steps 0", 2, "steps=0 must be at least 1"),
        ("plan --check /no/such/file.json", 1, "cannot be read"),
        (
            "plan --device h900 --parameters 7e9 --hosts 2 --link 1gbit",
            2,
            "choose from a100, h100, l40s, 4090",
        ),
        ("plan --device h100 --check pyproject.toml", 2, "--device plans without measurements"),
        ("plan --parameters 1e7 --tokens 10 --hosts 2 --link 1gbit", 2, "--tokens needs --device"),
        (
            "plan --device h100 --parameters 1e7 --tokens 10 --compute 1s --hosts 2 --link 1gbit",
            2,
            "both set the time of a step",
        ),
        ("plan --device h100 --parameters 1e7 --tokens 0 --hosts 2 --link 1gbit", 2, "tokens=0 must be at"),
        ("plan --device h100 --model conv --hosts 2 --link 1gbit", 2, "is not a transformer"),
        ("nonsense", 2, "No such command"),
    ],
)
def test_bad_input_is_one_line_and_an_exit_code(words: str, code: int, message: str) -> None:
    result = run(*words.split())
    assert result.exit_code == code
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("Error: ")


def test_a_plan_for_a_model_that_does_not_fit_here() -> None:
    words = "plan --parameters 2e7 --compute 0.4s --hosts 4 --rtt 1ms --programs BF16,Int8,RandomK --json"
    slow, fast = (json.loads(run(*words.split(), "--link", link).stdout) for link in ("100mbit", "unlimited"))
    assert slow["program"] == "Int8()"
    assert slow["line"] == "wire = thinwire.attach(ddp, thinwire.Int8())"
    assert [row["name"] for row in slow["rows"]] == ["DDP", "BF16()", "Int8()", "RandomK()"]
    plain, half = slow["rows"][:2]
    assert plain["bytes"] == pytest.approx(2 * 3 / 4 * 4 * 2e7, rel=0.05)
    assert half["bytes"] == pytest.approx(plain["bytes"] / 2, rel=0.01)
    assert plain["low"] < plain["step"] < plain["high"]
    assert slow["rows"][3]["gap"] is None
    assert fast["recommendation"].startswith("Don't.")


def test_a_plan_for_a_device_says_that_it_is_predicted_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured(*given: Any) -> Any:
        raise AssertionError("a plan for a device measured something here")

    monkeypatch.setattr("thinwire.plan.compute.copy_rate", measured)
    monkeypatch.setattr("thinwire.plan.compute.cores_per_rank", measured)
    monkeypatch.setattr("thinwire.plan.encode.measure", measured)
    note = "Predicted from data sheets, not measured: run `thinwire doctor --accelerator` on the device."
    given = "plan --device h100 --parameters 2e7 --link 10gbit --programs BF16,Int8 --hosts"
    words = given.split()
    shown = run(*words, "8")
    assert shown.exit_code == 0, shown.output
    assert note in shown.stdout
    assert "Measured with" not in shown.stdout
    assert "launches" in shown.stdout
    assert note in run(*words, "2..8").stdout
    found = json.loads(run(*words, "8", "--json").stdout)
    assert found["measured"] is False
    plain, half, int8 = found["rows"]
    assert plain["compute"] == pytest.approx(6 * 2e7 * 8192 / (0.4 * 989e12), rel=0.05)
    assert (half["low"], half["high"], half["speed_up_bf16"]) == (None, None, 1.0)
    assert int8["launch_seconds"] == pytest.approx(5e-6 * int8["launches"])
    slower = json.loads(run(*words, "8", "--json", "--tokens", "16384").stdout)["rows"][0]
    assert slower["compute"] == pytest.approx(2 * plain["compute"])
    timed = json.loads(run(*words, "8", "--json", "--compute", "0.4s").stdout)["rows"][0]
    assert timed["compute"] == pytest.approx(0.4)


def test_a_device_takes_the_shapes_of_a_model_and_rates_in_bytes() -> None:
    words = "plan --device 4090 --model gpt-1m --hosts 8 --programs Int8 --json --link"
    bits, nbytes = (json.loads(run(*words.split(), link).stdout) for link in ("200gbit", "25GB/s"))
    assert bits["rows"][0]["bytes"] == nbytes["rows"][0]["bytes"]
    # Bits of Ethernet carry headers too, bytes of PCIe do not.
    assert bits["rows"][0]["step"] > nbytes["rows"][0]["step"]


def test_a_plan_of_many_world_sizes_is_a_line_each() -> None:
    words = "plan --parameters 1e7 --compute 0.1s --hosts 2..16 --link 1gbit --programs Int8"
    result = run(*words.split())
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines() if "hosts" in line] == [
        str(1 << bit) for bit in range(1, 5)
    ]


def test_a_plan_on_a_busy_machine_says_that_it_is_uncertain(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "plan --parameters 1e6 --compute 0.1s --hosts 2 --link 1gbit --programs Int8"
    seconds = itertools.count(0, 10_000)
    monkeypatch.setattr(load, "machine_seconds", lambda: float(next(seconds)))
    assert "Uncertain: other processes used" in run(*words.split()).stdout
    assert json.loads(run(*words.split(), "--json").stdout)["timing"]["busy"] is True
    monkeypatch.setattr(load, "machine_seconds", lambda: 0.0)
    quiet = run(*words.split())
    assert "Uncertain" not in quiet.stdout
    assert "Measured with" in quiet.stdout


def test_a_plan_is_checked_against_a_training_log(tmp_path: Path) -> None:
    times = {"encode_seconds": 0.01, "wire_seconds": 0.2, "exposed_seconds": 0.1}
    row = {"purpose": "gradients", "bytes_sent": 1_000_000, **times, "world_size": 2, "rank": 0}
    row |= {"overflowed": False, "ddp_bytes": 4_000_000, "time": 0.0}
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step in range(4)))
    words = f"plan --check {path} --parameters 1e6 --compute 0.1s --link 100mbit --programs BF16"
    result = run(*words.split())
    assert result.exit_code == 0, result.output
    assert "(+1" in result.stdout  # twice the bytes that the log has
    assert "as --programs Int8" in run(*words.replace("BF16", "BF16,Int8").split()).stderr


def test_a_training_log_becomes_a_page_beside_it(tmp_path: Path) -> None:
    times = {"encode_seconds": None, "wire_seconds": None, "exposed_seconds": None}
    row: dict[str, object] = {"step": 0, "purpose": "gradients", "bytes_sent": 5, **times, "collectives": 1}
    row |= {"rank": 0, "world_size": 2, "overflowed": False, "ddp_bytes": 20, "time": 0.0}
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps(row) + '\n{"step": 1, "pur')
    result = run("report", str(path))
    assert result.exit_code == 0
    assert result.stdout.strip() == str(tmp_path / "steps.html")
    assert "the last line is incomplete" in result.stderr
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


def results_of(workload: str, *texts: str) -> Results:
    """A benchmark of some programs on one link."""
    cell = summary.cell(summary.PLAIN, *(summary.track(text, "thinwire", 0.7, 5e6, 2.0) for text in texts))
    cell.workload = workload
    return Results("thinwire bench", {"steps": 12, "programs": [*texts]}, {"cores": "2"}, [cell])


def saved(path: Path, workload: str, *texts: str) -> Path:
    results_of(workload, *texts).save(path, [])
    return path


FIRST = ("cells", 0, "tracks", 0)
NESTED = "[" * 100_000 + "]" * 100_000
DAMAGE: list[tuple[tuple[Any, ...], Any]] = [
    (("format",), [2]),
    (("command",), None),
    (("settings",), ["x"]),
    (("settings", "steps"), [[[]]]),
    (("machine",), {"cores": 2}),
    (("cells",), {}),
    (("cells", 0), None),
    (("cells", 0, "workload"), 7),
    (("cells", 0, "hosts"), 0),
    (("cells", 0, "hosts"), 10**400),
    (("cells", 0, "rate"), "fast"),
    (("cells", 0, "rate"), -1),
    (("cells", 0, "parameters"), float("nan")),
    (("cells", 0, "tracks"), [[]]),
    (FIRST, {}),
    ((*FIRST, "name"), None),
    ((*FIRST, "name"), "\ud800"),
    ((*FIRST, "step_seconds"), []),
    ((*FIRST, "step_seconds"), [0.0] * 12),
    ((*FIRST, "step_seconds", 3), "1"),
    ((*FIRST, "step_seconds", 3), float("nan")),
    ((*FIRST, "step_seconds", 3), 1e308),
    ((*FIRST, "step_seconds"), [[1.0]]),
    ((*FIRST, "losses"), []),
    ((*FIRST, "losses"), [[1, 2, 3]]),
    ((*FIRST, "losses", 0), 5),
    ((*FIRST, "losses", 0, 1), float("inf")),
    ((*FIRST, "losses", -1, 0), 11),
    ((*FIRST, "seed_losses"), [[]]),
    ((*FIRST, "cycle"), 0),
    ((*FIRST, "averages_models"), "yes"),
    ((*FIRST, "surprise"), 1),
    (("cells", 0, "tracks", -1, "step_seconds"), None),
]


@pytest.mark.parametrize(("place", "value"), DAMAGE, ids=str)
def test_a_damaged_results_file_is_one_line(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    path = saved(tmp_path / "bench.json", "conv", "Int8")
    data = json.loads(path.read_text())
    *outer, last = place
    functools.reduce(lambda within, key: within[key], outer, data)[last] = value
    path.write_text(json.dumps(data))
    one_line(run("report", str(path)), 1, "bench.json ")
    assert not path.with_suffix(".html").exists()


@pytest.mark.parametrize("text", ["", "{", "null", "3", '"x"', NESTED, '{"format": 1}', "\xff", "\0"])
@pytest.mark.parametrize("name", ["bench.json", "steps.jsonl"])
def test_a_file_of_another_kind_is_one_line(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / name).write_text(text, encoding="latin-1")
    one_line(run("report", str(tmp_path / name)), 1, name)
    one_line(run("plan", "--check", str(tmp_path / name), "--programs", "Int8"), 1, name)
    if name == "bench.json":
        given = "plan --parameters 1e5 --compute 0.1s --hosts 2 --link 1gbit --programs Int8 --gaps"
        one_line(run(*given.split(), str(tmp_path / name)), 1, name)
        resumed = "bench --programs Exact --links loopback --steps 8 --out"
        one_line(run(*resumed.split(), str(tmp_path / name)), 1, name)


def one_line(result: Result, code: int, message: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def test_a_results_file_runs_nothing_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sentinel, hostile = tmp_path / "ran", tmp_path / "hostile"
    hostile.mkdir()
    (hostile / ".metadata").write_bytes(pickle.dumps(Hostile(sentinel)))
    (tmp_path / "their.py").write_text(f"open({str(sentinel)!r}, 'w').close()")
    texts = (
        f"read_states({str(hostile)!r})",
        f"load_checkpoint({str(hostile)!r}, 1, 2, 3)",
        f"os:system('touch {sentinel}')",
        "their:Program",
        f"Schedule({{0: read_states({str(hostile)!r})}})",
    )
    path = str(saved(tmp_path / "bench.json", "conv", *texts))
    assert run("report", path).exit_code == 0
    result = run("plan", "--check", path)
    assert result.exit_code == 0, result.output
    assert "left out: their:Program, because a file may not choose code to run" in result.stderr
    assert f"left out: os:system('touch {sentinel}')" in result.stderr
    given = "plan --parameters 1e5 --compute 0.1s --hosts 2 --link 1gbit --programs Int8 --gaps"
    result = run(*given.split(), path)
    assert result.exit_code == 0, result.output
    assert "if it is yours, add it to --programs" in result.stderr
    path = str(saved(tmp_path / "model.json", "their:build", "Int8"))
    assert run("report", path).exit_code == 0
    one_line(run("plan", "--check", path), 2, "if it is yours, pass --model their:build")
    one_line(run("plan", "--check", path, "--model", "other:build"), 2, "pass --model their:build")
    assert not sentinel.exists()


def test_a_results_file_of_the_users_own_code_is_checked_where_the_user_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    model, program = "tests.surface.test_cli:build", "tests.tools.bench.test_contestants:Mine(k=3)"
    path = str(saved(tmp_path / "bench.json", model, program))
    result = run("plan", "--check", path, "--model", model, "--programs", program, "--json")
    assert result.exit_code == 0, result.output
    assert [row["name"] for row in json.loads(result.stdout)[f"{model}, 2 hosts at 80mbit"]] == [
        "DDP",
        program,
    ]
    assert result.stderr == ""
    given = ["plan", "--parameters", "1e5", "--compute", "0.1s", "--hosts", "2", "--link", "1gbit", "--json"]
    result = run(*given, "--gaps", path, "--programs", program)
    assert json.loads(result.stdout)["rows"][1]["gap"] is not None, result.output


class Mean(torch.nn.Linear):
    """A model whose output is its loss."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return super().forward(batch).mean()


def build() -> tuple[torch.nn.Module, Any]:
    """A model as a user gives it."""
    return Mean(4, 2), lambda rank, step: torch.ones(3, 4)


@pytest.mark.parametrize("out", ["/dev/full", "/dev/null", "/proc/x.html", "/proc/x.json", "."])
@pytest.mark.parametrize("command", ["report {path} --out", "bench --links loopback --out", "plan --plot"])
def test_a_place_that_holds_no_file_is_refused_before_anything_runs(
    tmp_path: Path, command: str, out: str
) -> None:
    path = saved(tmp_path / "bench.json", "conv", "Int8")
    one_line(run(*command.format(path=path).split(), out), 2, f"out={out!r} ")
    assert Path("/dev/null").is_char_device()


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = saved(tmp_path / "bench.json", "conv", "Int8")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        one_line(run("report", str(path)), 1, "cannot be written (No space left on device)")
    monkeypatch.setattr(doctor_command, "examine", full)  # any other command, anywhere
    one_line(run("doctor"), 1, "Error: No space left on device")


def ends() -> Any:
    """A model that ends the process, as a script without a guard does."""
    sys.exit(0)


@pytest.mark.parametrize("command", ["plan --hosts 2 --link 1gbit", "bench --links loopback"])
def test_a_model_that_ends_the_process_is_an_error(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    given = ("--model", "tests.surface.test_cli:ends", "--programs", "Exact")
    one_line(run(*command.split(), *given), 2, "does not work (SystemExit: 0)")
    monkeypatch.setattr(doctor_command, "examine", ends)
    one_line(run("doctor"), 1, "called sys.exit(0)")


def no_way(*args: object) -> Any:
    raise UnavailableError("the lab needs the command 'ip', which is not installed: apt-get install iproute2")


def test_without_a_lab_the_commands_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (namespaces, doctor_command, bench_command):
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
    assert process.stderr == "thinwire's command line needs click: pip install click rich numpy\n"


WITHOUT_NUMPY = """
import importlib.metadata
from importlib.machinery import PathFinder

found, version = PathFinder.find_spec, importlib.metadata.version

def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] == "numpy" else found(name, path, target)

def version_of(name):
    if name == "numpy":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

PathFinder.find_spec, importlib.metadata.version = find_spec, version_of
"""


def test_without_numpy_no_warning_stands_above_the_output_and_doctor_says_what_it_is_for() -> None:
    script = f"{WITHOUT_NUMPY}\nfrom thinwire.__main__ import main\nmain()"
    command = [sys.executable, "-c", script, "doctor", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stderr == ""
    finding = next(one for one in json.loads(process.stdout) if one["name"] == "numpy")
    assert finding["ok"] is False
    assert "torch.distributed.checkpoint" in finding["remedy"]
    assert "pip install numpy" in finding["remedy"]


SAVES = """
import sys, warnings
import torch, torch.distributed as dist
import thinwire

warnings.simplefilter("ignore")
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = torch.nn.Linear(4, 4)
ddp, optimizer = torch.nn.parallel.DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
wire = thinwire.attach(ddp, thinwire.Int8())
try:
    thinwire.save_checkpoint(f"{folder}/checkpoint", ddp, optimizer, wire)
except thinwire.ThinwireError as error:
    print(type(error).__name__, error)
"""


def test_without_numpy_a_checkpoint_of_several_ranks_says_what_to_install(tmp_path: Path) -> None:
    script = WITHOUT_NUMPY + SAVES
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank), str(tmp_path)], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0].decode() for process in ranks]
    for process, out in zip(ranks, said, strict=True):
        assert process.returncode == 0
        assert re.match("(UnavailableError|MismatchError) .*save_checkpoint on 2 ranks needs numpy", out), out
        assert "pip install numpy" in out
    assert not (tmp_path / "checkpoint").exists()
    assert not (tmp_path / "checkpoint.unfinished").exists()


def test_nothing_to_clean_is_not_an_error() -> None:
    assert json.loads(run("lab", "--clean", "--json").stdout) == {"removed": 0}
