"""Each precaution of the engine prevents races, which the shadow device would report."""

import pytest

from tests.harness import run_ranks
from tests.shadow.device import SHADOW
from tests.shadow.sabotage import CUTS, races


@pytest.mark.parametrize("precaution", CUTS)
def test_a_removed_precaution_is_seen_as_races(precaution: str) -> None:
    found = run_ranks(races, 2, precaution, backend=SHADOW)
    assert [kept for kept, _, _ in found] == [0, 0]
    assert all(removed for _, removed, _ in found), "a rank's device reports no race"
    assert all(
        "no event orders them" in said or "is reused" in said for _, _, texts in found for said in texts
    )
