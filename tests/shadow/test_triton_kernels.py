"""Training through Triton's kernels on the shadow device: no races, equal replicas, and the CPU's bits."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which the dev extra installs on Linux with x86-64")

from tests.harness import run_ranks
from tests.shadow.device import SHADOW
from tests.shadow.matrix import SET_UPS, Found, run
from tests.shadow.sabotage import races
from tests.shadow.triton_kernels import launches, on_the_shadow_device


def run_by_triton(rank: int, world_size: int, name: str) -> tuple[Found, dict[str, int]]:
    with on_the_shadow_device():
        return run(rank, world_size, name), dict(launches)


CORE = ["Int8, three ranks", "Sign"]
MORE = [
    "Int8",
    "Int4",
    "Int2",
    "FP8",
    "TopK",
    "Sign, three ranks",
    "rules",
    "rules, bf16",
    "bf16",
    "a rank without pieces",
    "gradient_as_bucket_view",
    "GradScaler",
    "Join",
    "resume",
    "AcrossNodes, four ranks",
    "DiLoCo, overlap",
]


@pytest.mark.parametrize("name", [*CORE, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_training_through_kernels_has_the_bits_of_the_cpu(name: str) -> None:
    results = run_ranks(run_by_triton, SET_UPS[name].world_size, name, backend=SHADOW, fresh=True)
    for found, launched in results:
        # TopK on two ranks is `Gathered`: it decodes the mean without encoding it.
        wanted = {"encode", "mean_decode"} if name == "TopK" else {"encode", "mean_encode", "decode"}
        assert wanted <= {*launched}
        assert found.races == []
        assert torch.equal(found.parameters, results[0][0].parameters), "replicas differ"
        assert found.difference == 0, "the CPU computes other numbers"


def races_by_triton(rank: int, world_size: int, precaution: str) -> tuple[int, int, list[str]]:
    with on_the_shadow_device():
        return races(rank, world_size, precaution)


def test_a_kernel_that_does_not_wait_for_gradients_is_seen_as_a_race() -> None:
    precaution = "A program waits for the gradients of its bucket"
    for kept, removed, texts in run_ranks(races_by_triton, 2, precaution, backend=SHADOW, fresh=True):
        assert kept == 0
        assert removed > 0
        assert any("encode" in text for text in texts), "the kernels' uses of memory are not noted"
