"""What holds for all tests: JAX on the CPU, and the same random examples on every run."""

import os
from pathlib import Path

# What is compiled is kept here, and not among the user's.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parents[1] / "build" / "cache")
os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: a CUDA plugin without a GPU prints tracebacks

from hypothesis import HealthCheck, settings

# The first example of a shape compiles, so times say nothing about the code under test.
settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.register_profile("full", parent=settings.get_profile("ci"), derandomize=False, max_examples=500)
settings.load_profile("ci")  # `--hypothesis-profile` on the command line wins

from tilekern.passes import pipeline  # noqa: E402 -- after the settings above

# Every pass is verified in every test: the default of `run(func, passes, check=False)`.
pipeline.run.__kwdefaults__ = {"check": True}
