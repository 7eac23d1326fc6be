"""Kernels that cpu:llvm refuses run by the portable backend, with a warning. Asked for by name, they are errors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import like_first, numbers, refused
from tilekern import source
from tilekern.errors import DependencyError, FallbackWarning, ResourceError, TargetError
from tilekern.ir.core import Func
from tilekern.ir.elementwise import Elementwise
from tilekern.lower.llvm import lowering
from tilekern.lower.llvm.compile import toolchain
from tilekern.lower.llvm.runtime.machine import Machine

pytest.importorskip("llvmlite", reason="needs llvmlite")

X = numbers(6)


def fresh() -> tk.Kernel:
    """A kernel that nobody has lowered yet: families remember what they lowered."""

    @like_first
    def doubled(x, out):
        i = tk.parallel(6, 4)
        out[i] = x[i] * 2

    return doubled


def large(rows: int) -> Any:
    """A kernel that keeps all of a gigabyte and more: a sorted line of int64."""

    @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct((1,), x.dtype))
    def sorted_all(x, out):
        tile = jnp.broadcast_to(x[0], (rows,)) + jnp.arange(rows, dtype=x.dtype)
        out[0] = jnp.sort(tile)[-1]

    return sorted_all


def falls_back(call: Any, *reasons: str) -> np.ndarray:
    """The result of a call that warns once, and not again."""
    with pytest.warns(FallbackWarning) as caught:
        found = np.asarray(call())
    assert len(caught) == 1
    message = str(caught[0].message)
    for part in ("runs on cpu by the portable backend", *reasons):
        assert part in message
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        np.testing.assert_array_equal(np.asarray(call()), found)
    return found


def look_again() -> None:
    """The toolchain forgets what it knows of llvmlite and of the machine."""
    toolchain.llvmlite.cache_clear()
    toolchain.host.cache_clear()


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """After a test the toolchain finds what there is."""
    yield
    look_again()


def test_no_warning_where_nothing_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        np.testing.assert_array_equal(fresh()(X), 2 * X)


def test_llvmlite_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then `cpu` is the portable backend, and no warning is due."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    look_again()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        np.testing.assert_array_equal(fresh()(X), 2 * X)
        np.testing.assert_array_equal(fresh()(X, target="cpu"), 2 * X)
    with refused(
        DependencyError,
        "the target cpu needs llvmlite",
        expected="llvmlite >=",
        got="ModuleNotFoundError",
        fix="pip install 'llvmlite>=0.45,<0.51'",
    ):
        fresh()(X, target="cpu:llvm")  # <-


@pytest.mark.parametrize("asked", [None, "cpu"])
def test_llvmlite_does_not_load(monkeypatch: pytest.MonkeyPatch, asked: str | None) -> None:
    def load(name: str) -> Any:
        raise OSError("libllvmlite.so: cannot open shared object file")

    monkeypatch.setattr(toolchain.importlib, "import_module", load)
    look_again()
    made = fresh()
    found = falls_back(lambda: made(X, target=asked), "the target cpu needs llvmlite", "libllvmlite.so")
    np.testing.assert_array_equal(found, 2 * X)
    with pytest.raises(DependencyError, match="libllvmlite"):
        made(X, target="cpu:llvm")


def test_llvmlite_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    import llvmlite

    monkeypatch.setattr(llvmlite, "__version__", "0.44.0")
    look_again()
    made = fresh()
    np.testing.assert_array_equal(falls_back(lambda: made(X), "not supported", "llvmlite 0.44.0"), 2 * X)


def test_a_cpu_without_the_features(monkeypatch: pytest.MonkeyPatch) -> None:
    features = toolchain.llvmlite().get_host_cpu_features()
    older = {name: there and name not in ("avx2", "neon") for name, there in features.items()} | {"neon": False}
    monkeypatch.setattr(toolchain.llvmlite(), "get_host_cpu_features", lambda: older)
    toolchain.host.cache_clear()
    made = fresh()
    np.testing.assert_array_equal(falls_back(lambda: made(X), "CPU without the needed features", "AVX2"), 2 * X)
    with pytest.raises(TargetError, match="CPU without the needed features"):
        made(X, target="cpu:llvm")


@pytest.fixture
def refuses_negation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A legalisation that refuses an op, for there is none that the backend lacks."""
    legalize = lowering.legalize

    def refuse(func: Func, machine: Machine) -> Func:
        for op in func.walk():
            if isinstance(op, Elementwise) and op.function == "neg":
                with source.at(op.loc):
                    raise TargetError("no neg", expected="another op", got="neg", fix="subtract")
        return legalize(func, machine)

    monkeypatch.setattr(lowering, "legalize", refuse)


def negating() -> tk.Kernel:
    """A kernel that nobody has lowered yet."""

    @like_first
    def negative(x, out):
        i = tk.parallel(6, 4)
        out[i] = -x[i]

    return negative


@pytest.mark.usefixtures("refuses_negation")
def test_an_op_that_is_refused() -> None:
    made = negating()
    np.testing.assert_array_equal(falls_back(lambda: made(X), "no neg", "out[i] = -x[i]"), -X)
    with pytest.raises(TargetError, match="no neg") as caught:
        made(X, target="cpu:llvm")
    assert (caught.value.loc.file, caught.value.got) == (__file__, "neg")


@pytest.mark.usefixtures("refuses_negation")
def test_a_refused_op_in_a_batch() -> None:
    rows, made = jnp.stack([X, -X]), negating()
    with pytest.warns(FallbackWarning, match="no neg"):
        found = jax.jit(jax.vmap(lambda x: made(x)))(rows)
    np.testing.assert_array_equal(found, -rows)


@pytest.mark.parametrize("asked", [None, "cpu", "cpu:llvm"])
def test_too_much_scratch_is_an_error_also_without_a_target(asked: str | None) -> None:
    """The portable backend would need the memory, too."""
    made, x = large(1 << 28), np.zeros(1, np.int64)
    with jax.enable_x64(True):
        traced = jax.jit(lambda x: made(x, target=asked)).trace(x)
        with pytest.raises(ResourceError, match="sorted_all needs too much memory") as caught:
            traced.lower()
    assert (caught.value.loc.file, caught.value.fix) == (__file__, "use smaller blocks")
    assert "at most 1073741824 bytes for each thread" in str(caught.value)


def test_scratch_that_just_fits() -> None:
    made, x = large(1 << 12), np.full(1, 3, np.int32)
    np.testing.assert_array_equal(made(x), [4098])


@pytest.mark.usefixtures("refuses_negation")
def test_the_stages_of_a_kernel_fall_back_unless_they_are_asked_by_name() -> None:
    made = negating()
    with pytest.warns(FallbackWarning, match="runs on cpu by the portable backend"):
        lowered = made.trace(X).lower()
    assert "stablehlo" in lowered.text
    with pytest.raises(TargetError, match="no neg"):
        made.trace(X).lower("cpu:llvm")


def test_asked_for_a_cpu_a_call_is_portable_elsewhere() -> None:
    traced = jax.jit(lambda x: fresh()(x, target="cpu")).trace(X)
    assert "custom_call" not in traced.lower(lowering_platforms=("cuda",)).as_text()
