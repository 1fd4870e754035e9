"""thinwire on the shadow device: no races, equal replicas, and the CPU's numbers."""

import pytest
import torch

from tests.harness import run_ranks
from tests.shadow.device import SHADOW
from tests.shadow.matrix import PROGRAMS, run


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_device_computes_what_the_cpu_does_without_races(name: str) -> None:
    results = run_ranks(run, 2, name, backend=SHADOW)
    for found in results:
        assert found.races == []
        assert torch.equal(found.parameters, results[0].parameters), "replicas differ"
        assert found.difference <= PROGRAMS[name].close, "the CPU's numbers are others"
