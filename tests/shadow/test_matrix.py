"""thinwire on the shadow device: no races, equal replicas, and the CPU's numbers."""

import pytest
import torch

from tests.harness import run_ranks
from tests.shadow.device import SHADOW
from tests.shadow.matrix import CORE, MORE, SET_UPS, run


@pytest.mark.parametrize("name", [*CORE, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_device_computes_what_the_cpu_does_without_races(name: str) -> None:
    results = run_ranks(run, SET_UPS[name].world_size, name, backend=SHADOW)
    for found in results:
        assert found.races == []
        assert torch.equal(found.parameters, results[0].parameters), "replicas differ"
        assert found.difference <= SET_UPS[name].close, "the CPU computes other numbers"
