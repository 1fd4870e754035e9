"""One check in a process of its own, so that a hang or a crash of it ends nothing else.

`python -m thinwire.tools.doctor.child NAME RESULT` is started by the supervisor with torchrun's variables.
"""

import faulthandler
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from thinwire.tools.doctor import cost, facts, running, values
from thinwire.tools.doctor.check import FAILED, Check, Outcome, Surroundings

CHECKS = {
    "facts": Check(facts.facts, 60),
    "groups": Check(running.groups, 60),
    "collectives": Check(values.collectives, 90),
    "bits": Check(values.bits, 90),
    "streams": Check(running.streams, 120),
    "host reads": Check(running.host_reads, 60),
    "overflow": Check(running.overflow, 60),
    "failing program": Check(running.failing_program, 60),
    "lost rank": Check(running.lost_rank, 60),
    "memory": Check(cost.memory, 90),
    "rates": Check(cost.rates, 60),
    "speed": Check(cost.speed, 120),
}
"""All checks in the order of the table, each with the seconds after which it counts as hung."""


def main() -> None:
    """Run one check, and write its outcome as JSON."""
    name, result = sys.argv[1:3]
    request: dict[str, Any] = json.loads(os.environ["THINWIRE_DOCTOR_CHILD"])
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the supervisor asks for the stacks of a hang
    for module in request["imports"]:
        importlib.import_module(module)
    gc.freeze()  # checks collect their models, and torch's modules are never garbage: 150 ms each time
    device = torch.device(request["device"], int(os.environ.get("LOCAL_RANK", "0")))
    if device.type == "cpu":
        device = torch.device("cpu")
    else:
        torch.get_device_module(device.type).set_device(device)
    around = Surroundings(
        name=name,
        device=device,
        backend=request["backend"],
        parameters=request["parameters"],
        limit=CHECKS[name].limit / 2,  # so that a lost rank shows as an error before the check counts as hung
    )
    try:
        outcome = CHECKS[name].run(around)
    except Exception as error:  # whatever a check raises is its result
        text = f"{type(error).__name__}: {str(error)[:300]}"
        outcome = Outcome(FAILED, text, {"traceback": traceback.format_exc()[-4000:]})
    Path(result).write_text(json.dumps(outcome.as_dict()), encoding="utf-8")
    # Groups that lost a rank may block the interpreter's exit, and the result is already written.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
