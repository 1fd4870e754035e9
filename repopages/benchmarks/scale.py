"""Measure builds of growing parts of a repository: the time and memory of a first and of a second one.

    python repopages/benchmarks/scale.py torch --include '*.py'

A part is a copy of every n-th file. The first build starts with an empty cache, the second one after a line
was added to one file. "CPU" is the time of all cores, which other programs disturb less. Memory is
that of all processes of a build together, sampled.
"""

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from repopages.reading.repository import Repository


def main() -> None:
    """Print a row for each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", help="a folder, or the name of an installed package")
    parser.add_argument(
        "--include", action="append", default=[], help="pattern of files, as for repopages build"
    )
    parser.add_argument("--parts", default="8,4,2,1", help="every how manieth file is taken, for each row")
    parser.add_argument("--format", default="markdown", choices=("markdown", "site"))
    chosen = parser.parse_args()
    repository = Repository.open(chosen.path, chosen.include)
    print(" files        bytes  seconds  CPU s  CPU ms/file    MB  again s  CPU s")
    for part in map(int, chosen.parts.split(",")):
        with tempfile.TemporaryDirectory(prefix="repopages-scale-") as folder:
            _row(repository, repository.files[::part], Path(folder), chosen.format)


def _row(repository: Repository, files: list[str], folder: Path, form: str) -> None:
    """Build a part twice, and print what it took."""
    root, size = folder / repository.name, 0
    for path in files:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        if (repository.root / path).is_file():
            shutil.copyfile(repository.root / path, root / path)
            size += (root / path).stat().st_size
    first, work, memory = _build(root, folder, form)
    changed = next(
        path for path in files[len(files) // 2 :] if path.endswith((".py", ".md", ".c", ".js", ".rs"))
    )
    with open(root / changed, "a", encoding="utf-8") as file:
        file.write("\n\n")
    again, little, _ = _build(root, folder, form)
    count = len(files)
    each = 1000 * work / count
    print(
        f"{count:6} {size:12,} {first:8.1f} {work:6.1f} {each:12.1f}",
        f"{memory >> 20:5} {again:8.1f} {little:6.1f}",
        flush=True,
    )


def _build(root: Path, folder: Path, form: str) -> tuple[float, float, int]:
    """Run a build in a process. Return its seconds, those of all cores, and the most bytes that it had."""
    command = [
        sys.executable,
        "-m",
        "repopages",
        "build",
        str(root),
        "--out",
        str(folder / "out"),
        "--format",
    ]
    environment = {**os.environ, "REPOPAGES_CACHE": str(folder / "cache")}
    start, before, most = time.monotonic(), _cpu(), 0
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(
            [*command, form], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        ) as process,
    ):
        while process.poll() is None:
            most = max(most, _memory(process.pid))
            time.sleep(0.1)
    if process.returncode:
        raise SystemExit((folder / "log").read_text()[-2000:])
    return time.monotonic() - start, _cpu() - before, most


def _cpu() -> float:
    """Return the seconds of all cores that finished processes took, and those that they started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _memory(pid: int) -> int:
    """Return the bytes of a process and of those that it started, on Linux."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        children = [
            text
            for task in Path(f"/proc/{pid}/task").iterdir()
            for text in (task / "children").read_text().split()
        ]
    except (OSError, IndexError):
        return 0
    return own + sum(_memory(int(child)) for child in children)


if __name__ == "__main__":
    main()
