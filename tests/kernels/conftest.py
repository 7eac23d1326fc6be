"""Every test that calls a kernel runs on both backends for CPUs, and in the interpreters of Triton and of Pallas.

What TPUs have not, 64 bits foremost, the portable backend does in the place of Mosaic, as it does for users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import sweeps
from tilekern.kernel import dispatch
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import TARGETS, Target
from tilekern.lower.triton.interpret import interpret
from tilekern.lower.triton.lowering import TritonLowering


def on(target: str) -> Callable[..., Target]:
    """In place of `on_platform`: every call is lowered for one target."""
    return lambda platform, asked, exporting=False: asked or TARGETS[target]


def _run(lowering: TritonLowering, *inputs: Any) -> Sequence[jax.Array]:
    """In place of the custom call, for which there may be no GPU."""
    program = lowering.program
    types = [jax.ShapeDtypeStruct(p.ref.shape, p.ref.dtype) for p in lowering.func.outputs]
    return jax.pure_callback(lambda *arrays: tuple(interpret(program, arrays)), types, *inputs)


# In place of the kernel, for which there may be no TPU.
_run_interpreted = partialmethod(MosaicLowering.run, interpret=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked `one_backend` calls no kernel, or XLA's program in ways that a callback in it forbids.

    Of Mosaic `make test` sees small cases in bfloat16 and all else in float32. XLA has 64 bits to itself. Kernels in
    interpreters are a sweep: the backends have tests of their own. So are those on CPUs, whose two backends take turns.
    """
    items[:] = [i for i in items if not (i.get_closest_marker("one_backend") and _backend(i) not in ("", "xla"))]
    for item in items:
        left_out = ("float64", "float32") if "test_small_cases" in item.name else ("float64", "float16")
        if _backend(item) == "mosaic" and any(dtype in item.name for dtype in left_out):
            item.add_marker(pytest.mark.slow)
        if mark := _sweep(item):
            item.add_marker(mark)


def _sweep(item: pytest.Item) -> pytest.MarkDecorator | None:
    """The sweep of a test of kernels; of most cases an ordinary run takes a sixth, on one of both CPU backends."""
    backend = _backend(item)
    if not backend or (backend in ("xla", "llvm") and item.get_closest_marker("one_backend")):
        return None
    if backend in ("triton", "mosaic"):
        return pytest.mark.sweep(24)
    if item.originalname in ("test_floats", "test_small_cases"):
        return pytest.mark.sweep(12)
    if item.get_closest_marker("sweep"):
        return pytest.mark.sweep(4)
    function, _, case = item.nodeid.partition("[")
    return pytest.mark.sweep(12, among=f"{function}[{case.replace(backend, '', 1)}")


# Compared as text, which is many times as fast: pytest asks for tens of thousands of tests.
_FOLDER = Path(__file__).parent.as_posix() + "/"


def _backend(item: pytest.Item) -> str:
    """The backend under test, of a test of kernels; this file sees the tests of other folders, too."""
    of_kernels = item.path.as_posix().startswith(_FOLDER)
    return item.callspec.params.get("backend", "") if of_kernels and hasattr(item, "callspec") else ""


_TARGETS = {"xla": "cpu:xla", "llvm": "cpu:llvm", "triton": "cuda:sm_90", "mosaic": "tpu:v5e"}


@pytest.fixture(scope="module", params=_TARGETS, autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend under test; what was compiled for another one is forgotten.

    XLA does not optimize programs of Pallas' interpreter: its vectorizer does not end for the random bits of a tile.
    """
    optimizes = sweeps.choose(request.config) == "all"
    jax.config.update("jax_disable_most_optimizations", not optimizes or request.param == "mosaic")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "on_platform", on(_TARGETS[request.param]))
        if request.param == "llvm":
            pytest.importorskip("llvmlite", reason="needs llvmlite")
        elif request.param == "triton":
            pytest.importorskip("triton", reason="needs triton")
            patch.setattr(TritonLowering, "run", _run)
        elif request.param == "mosaic":
            patch.setattr(MosaicLowering, "run", _run_interpreted)
        jax.clear_caches()
        yield request.param
    jax.config.update("jax_disable_most_optimizations", not optimizes)
    jax.clear_caches()
