"""Measured rate of emulated links, by bulk transfers from one host to another.

.venv/bin/python benchmarks/bandwidth.py
"""

import argparse
import statistics
import sys

from thinwire.tools.lab.namespaces import Lab
from thinwire.tools.lab.network import plan
from thinwire.tools.lab.run import run_on

_PROGRAM = """
import os, socket, struct, sys, time
if os.environ["RANK"] == "0":
    with socket.create_server(("10.77.0.1", 5000)) as server:
        connection, _ = server.accept()
        # By the sender's clock, which is the same: a receiver that is late finds bytes that took no time.
        (started,), received = struct.unpack("d", connection.recv(8, socket.MSG_WAITALL)), 8
        while chunk := connection.recv(1 << 20):
            received += len(chunk)
        print(8 * received / (time.monotonic() - started))
else:
    while True:
        try:
            connection = socket.create_connection(("10.77.0.1", 5000))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    connection.sendall(struct.pack("d", time.monotonic()) + bytes(int(sys.argv[1])))
"""


def transfer(payload: int) -> list[str]:
    """Return a command for two hosts. The second sends `payload` bytes, the first prints bits per second."""
    return [sys.executable, "-c", _PROGRAM, str(payload)]


def measured_rate(lab: Lab, seconds: float) -> float:
    """Return the bits per second of a transfer that should take `seconds`."""
    assert lab.network.rate is not None
    lines: list[str] = []
    command = transfer(int(lab.network.rate / 8 * seconds))
    finished = run_on(lab, command, lambda host, stream, line: lines.append(line))
    assert finished.exit_code == 0, lines
    return float(lines[0])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="1mbit,10mbit,100mbit,1gbit,10gbit")
    parser.add_argument("--seconds", type=float, default=2.0)
    options = parser.parse_args()
    print(f"{'rate':<10}{'measured, median of 5':>24}")
    for rate in options.rates.split(","):
        with Lab(plan(hosts=2, rate=rate)) as lab:
            rates = [measured_rate(lab, options.seconds) for _ in range(5)]
            ratios = [rate / (lab.network.rate or 1) for rate in rates]
        spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
        print(f"{rate:<10}{statistics.median(ratios):>10.3f} x {spread}")


if __name__ == "__main__":
    main()
