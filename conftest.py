"""For all tests: JAX on CPUs, the same random examples on every run, samples of sweeps, the longest files first."""

import gc
import importlib
import os
from pathlib import Path
from typing import Any

# What tilekern compiles is kept here, and not among the user's.
os.environ["XDG_CACHE_HOME"] = str(Path(__file__).parent / "build" / "cache")
os.environ.pop("TILEKERN_CACHE", None)
os.environ["JAX_PLATFORMS"] = "cpu"  # before jax is imported: a CUDA plugin without a GPU prints tracebacks
# Every pass and every plan is verified in every test, and memory that a program may not read yet holds NaN.
os.environ["TILEKERN_DEBUG"] = ",".join(filter(None, (os.environ.get("TILEKERN_DEBUG"), "verify", "poison")))

import jax
import pytest
from hypothesis import HealthCheck, settings

from tests import compilations, durations, repeats, seeds, sweeps

# Millions of objects live as long as the process, and JAX adds work of its own to each collection: fewer of them.
gc.set_threshold(50_000, 10, 10)

# Tests of meshes take up to 8 devices, all others the first one. Processes that tests start have their own number.
if "device_count" not in os.environ.get("XLA_FLAGS", ""):
    jax.config.update("jax_num_cpu_devices", 8)

_COMPILED = compilations.folder(Path.home() / ".cache", Path(os.environ["XDG_CACHE_HOME"]))
compilations.keep(_COMPILED)
compilations.link_machine_code(_COMPILED.parents[1] / "llvm", Path(os.environ["XDG_CACHE_HOME"]) / "tilekern")

# The first example of a shape compiles, so times say nothing about the code under test.
settings.register_profile(
    "ci", derandomize=True, deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.register_profile(
    "full", parent=settings.get_profile("ci"), derandomize=False, max_examples=500, print_blob=True
)
settings.load_profile("ci")  # `--hypothesis-profile` on the command line wins


_PACKAGE = Path(__file__).parent / "tilekern"


def pytest_collect_file(file_path: Path) -> None:
    """Import a package of ours before the doctests of its modules.

    pytest would import `tilekern/testing/check.py` a second time, and store this module as `tilekern.testing.check`,
    in the place of the function of this name.
    """
    if file_path.suffix == ".py" and file_path.is_relative_to(_PACKAGE):
        importlib.import_module(".".join(file_path.relative_to(_PACKAGE.parent).parent.parts))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of `tests.sweeps`, `tests.seeds` and `tests.durations`."""
    parser.addoption("--sweep", default=sweeps.SAMPLE, help="the sample of sweeps: a number, or 'all'")
    parser.addoption("--seeds", default="0", help="which random programs: a number; see tests/seeds.py")
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json after the run")


def pytest_configure(config: pytest.Config) -> None:
    """Set up XLA for the sample; record in the process that starts those of pytest-xdist."""
    seeds.begin(str(config.getoption("--seeds")))
    if not hasattr(config, "workerinput"):
        compilations.prune(_COMPILED)
    # Most of the time is that of XLA's compiler, whose optimizations only a run of all sweeps waits for.
    jax.config.update("jax_disable_most_optimizations", sweeps.choose(config) != "all")
    if config.getoption("--record-durations"):
        config.pluginmanager.register(durations.Recorder(writes=not hasattr(config, "workerinput")))


def pytest_collection_finish() -> None:
    """Objects from before the first test stay: collections need not look at them again."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the sample and the seeds, to repeat a failure."""
    terminalreporter.write_line(f"to repeat: --sweep {sweeps.choose(config)} --seeds {config.getoption('--seeds')}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of sweeps that the sample lacks; on several processes, start the longest files first."""
    sweeps.mark(items)
    left_out = sweeps.left_out(items, sweeps.choose(config))
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
    repeats.mark(items)
    if hasattr(config, "workerinput"):
        durations.longest_first(items)
