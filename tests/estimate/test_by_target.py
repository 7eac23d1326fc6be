"""Estimates of lowered programs: what holds on every target, and what is refused."""

import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tilekern as tk
from tests.estimate.kernels import counted, product, row_sums, types
from tilekern.errors import EstimateError
from tilekern.estimate import Estimate, estimate, on_cpu
from tilekern.estimate.cpu.rates import Rates
from tilekern.lower.backend import Backend, Target
from tilekern.lower.target import BACKENDS

needs_llvm = pytest.mark.skipif(find_spec("llvmlite") is None, reason="needs llvmlite")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
FAST = [pytest.param("cpu:llvm", marks=needs_llvm), pytest.param("cuda:sm_90", marks=needs_triton)]
TARGETS = [*FAST, pytest.param("tpu:v5e", marks=needs_libtpu)]


@cache
def lowered(kernel: Any, target: str, *shapes: tuple[int, ...]) -> tk.Lowered:
    return kernel.trace(*types(*shapes, dtype=jnp.bfloat16 if kernel is product else jnp.float32)).lower(target)


@cache
def of_product(target: str, rows: int, inner: int) -> Estimate:
    return lowered(product, target, (rows, inner), (inner, 256)).estimate()


@pytest.mark.parametrize("target", TARGETS)
def test_the_parts_of_an_estimate_agree(target: str) -> None:
    forecast = of_product(target, 512, 512)
    assert 0 < forecast.bound <= forecast.seconds and forecast.bound_by in ("matrix", "memory")
    assert all(0 <= part <= 1.001 for part in forecast.busy.values()) and forecast.busy["matrix"] > 0
    assert forecast.flops_useful == 2 * 512 * 512 * 256
    assert forecast.bytes_required == 2 * (512 * 512 + 2 * 512 * 256) <= forecast.bytes_moved
    assert forecast.flops_done is None or forecast.flops_done >= 0.99 * forecast.flops_useful
    assert target in str(forecast) and "of the bound" in str(forecast)
    assert (forecast.occupancy is not None) == target.startswith("cuda")


@pytest.mark.parametrize("longer", [(1024, 512), (512, 1024), (4096, 1024)])
@pytest.mark.parametrize("target", FAST)
def test_more_work_takes_more_time(target: str, longer: tuple[int, int]) -> None:
    """On a GPU, more programs find more operands in the L2 cache, so a load takes a little less time on average."""
    slack = 0.98 if target.startswith("cuda") else 1.0
    shorter = of_product(target, 512, 512)
    assert slack * shorter.seconds <= of_product(target, *longer).seconds
    assert shorter.bound <= of_product(target, *longer).bound


@needs_llvm
@given(counts=st.tuples(st.integers(0, 2048), st.integers(0, 2048)).map(sorted))
def test_a_longer_loop_never_takes_less_time(counts: list[int]) -> None:
    program = lowered(row_sums, "cpu:llvm", (64, 2048), (64,))
    shorter, longer = (program.estimate(n=n) for n in counts)
    assert shorter.seconds <= longer.seconds and shorter.bytes_moved <= longer.bytes_moved


@needs_triton
def test_a_longer_loop_of_a_gpu_takes_more_time() -> None:
    program = lowered(row_sums, "cuda:sm_90", (64, 2048), (64,))
    forecasts = [program.estimate(n=n) for n in (0, 1, 1000, 2048)]
    for shorter, longer in pairwise(forecasts):
        assert shorter.seconds < longer.seconds and shorter.bytes_moved < longer.bytes_moved


@pytest.mark.parametrize("target", FAST)
def test_every_program_has_its_own_number_of_iterations(target: str) -> None:
    """8 programs run 0, 1, ... or 7 iterations: as many bytes as 3.5 each."""
    program = lowered(row_sums, target, (64, 2048), (64,))
    each = program.estimate(n=np.arange(64) // 8 * 128).bytes_moved
    fewer, more = (program.estimate(n=128 * n).bytes_moved for n in (3, 4))
    assert each == pytest.approx((fewer + more) / 2, rel=0.01)


@pytest.mark.slow
@needs_libtpu
def test_bundles_follow_given_arrays() -> None:
    program = lowered(row_sums, "tpu:v5e", (64, 2048), (64,))
    one, two, four = (program.estimate(n=128 * n).seconds for n in (1, 2, 4))
    assert one < two < four


@pytest.mark.parametrize("target", TARGETS)
def test_missing_values_are_refused_before_anything_is_compiled(target: str) -> None:
    with pytest.raises(EstimateError, match="the values of n decide"):
        lowered(row_sums, target, (64, 2048), (64,)).estimate()


@needs_llvm
def test_the_roofline_refuses_to_guess_a_while() -> None:
    with pytest.raises(EstimateError, match="cannot tell how often a loop of counted runs"):
        lowered(counted, "cpu:llvm", (8,), (1,)).estimate(n=3)


@needs_triton
@pytest.mark.parametrize("target", ["cuda:sm_86", "rocm:gfx942"])
def test_a_gpu_without_a_model_is_refused(target: str) -> None:
    with pytest.raises(EstimateError, match="there is no cycle model of"):
        lowered(product, target, (64, 64), (64, 256)).estimate()


def test_the_portable_backend_has_no_model() -> None:
    with pytest.raises(EstimateError, match="no model of programs of the portable backend"):
        lowered(product, "cpu:xla", (64, 64), (64, 256)).estimate()


OTHER = Target("cpu:other", "cpu", "other")


def never(*unused: Any) -> Any:
    raise AssertionError("nothing is lowered here")


class OtherLowering:
    """A program of another package's backend."""

    def __init__(self, func: Any) -> None:
        self.func = func


def test_a_backend_of_another_package_has_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "other", Backend("other", (OTHER,), lower=never))
    with pytest.raises(EstimateError, match="no model of programs of this backend") as caught:
        estimate(OtherLowering(None), OTHER, [], {})  # pyright: ignore[reportArgumentType]
    assert "OtherLowering" in str(caught.value)


@needs_llvm
def test_a_backend_of_another_package_declares_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    program = lowered(product, "cpu:xla", (64, 64), (64, 256))
    forecast = of_product("cpu:llvm", 64, 64)
    module = ModuleType("model_of_other")
    module.estimate = lambda lowering, values: (lowering, values, forecast)[-1]  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    record = Backend("other", (OTHER,), lower=never, estimator=module.__name__)
    monkeypatch.setitem(BACKENDS, "other", record)
    known = [None for _ in program.ir.inputs]
    assert estimate(OtherLowering(program.ir), OTHER, known, {}) is forecast  # pyright: ignore[reportArgumentType]


def test_nothing_of_estimates_is_imported_with_tilekern() -> None:
    code = "import sys, tilekern; sys.exit(any(name.startswith('tilekern.estimate') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@needs_llvm
def test_arrays_that_a_body_closes_over_are_known() -> None:
    lengths = jnp.array([256], jnp.int32)

    @tk.kernel(out_type=lambda x: x)
    def prefix(x: Any, out: Any) -> None:
        columns = tk.serial(x.shape[1], 128, stop=lengths[0])
        out[...] = jnp.zeros(x.shape, x.dtype)

        def step(j: Any) -> None:
            out[:, j] = x[:, j]

        tk.foreach(columns, step)

    assert prefix.trace(*types((8, 1024))).lower("cpu:llvm").compile().estimate().seconds > 0


@needs_llvm
def test_vectors_of_a_cpu_do_half_the_operations_that_its_multiply_adds_do(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = Rates(4e11, 8e11, 3e11, 2e11, 1e11, 1, "2026-11-26")
    monkeypatch.setattr(on_cpu, "rates", lambda machine: rates)
    found = lowered(row_sums, "cpu:llvm", (64, 2048), (64,)).estimate(n=2048)
    assert found.busy["vector"] * found.seconds == pytest.approx(64 * 2048 / (rates.float32 / 2), rel=0.05)
