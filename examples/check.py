"""Run the examples with the installed thinwire: `python examples/check.py`, also by `make dist`."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
EXAMPLES = ("train.py", "train_diloco.py", "train_zero.py")


def main() -> None:
    """Run each example on two ranks, then look a name up. Exit with the code of the first that fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    commands = [[*torchrun, str(FOLDER / name)] for name in EXAMPLES]
    commands += [
        [sys.executable, "-m", "thinwire", *words] for words in (["docs", "residual"], ["--version"])
    ]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"}
    for command in commands:
        print("$", *command[1:], flush=True)
        code = subprocess.run(command, env=environment, check=False).returncode
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()
