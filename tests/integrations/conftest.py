"""Ranks start with the frameworks loaded: each takes seconds to import, and every rank would do so."""

from tests import harness

harness.preload(
    "accelerate",
    "transformers.trainer",
    "transformers.models.gpt2.modeling_gpt2",
    "lightning.pytorch",
    "tests.integrations.frameworks",
    "benchmarks.live_job",
)
