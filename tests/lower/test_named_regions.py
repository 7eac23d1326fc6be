"""Regions in the programs of every backend: HLO, Mosaic's programs, Triton's source, PTX, and explanations."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tilekern.ir.core import Op
from tilekern.ir.shape import Iota
from tilekern.lower.named_regions import NamedRegions
from tilekern.source import Loc

X = jax.ShapeDtypeStruct((512, 256), jnp.float32)


@tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape[:1], x.dtype))
def energies(x: Any, out: Any, *, rows: tk.Block = 128, columns: tk.Block = 128) -> None:
    """For each row the square root of the sum of exponentials."""
    i = tk.parallel(x.shape[0], rows)

    def step(j: Any, total: Any) -> Any:
        with tk.region("weights"):
            w = jnp.exp(x[i, j])
        return total + w.sum(1)

    with tk.region("sums"):
        total = tk.fold(tk.serial(x.shape[1], columns), step, tk.zeros((i,)))
    with tk.region("roots"):
        out[i] = jnp.sqrt(total)


def gradient(x: Any) -> Any:
    return jax.grad(lambda v: energies(v, target="cpu:xla").sum())(x)


def test_hlo_of_the_portable_backend_has_the_scopes() -> None:
    text = jax.jit(lambda x: energies(x, target="cpu:xla")).lower(X).as_text(debug_info=True)
    names = set(re.findall(r'loc\("([^"]*)"', text))
    assert any(re.search(r"\bsums/weights/.*exp$", name) for name in names), names
    assert any(re.search(r"\broots/.*sqrt$", name) for name in names)
    assert not any("weights/weights" in name or "sums/sums" in name for name in names)


def test_gradients_have_the_scopes_of_the_operations_that_they_come_from() -> None:
    text = jax.jit(gradient).lower(X).as_text(debug_info=True)
    names = set(re.findall(r'loc\("([^"]*)"', text))
    assert any(re.search(r"\bweights/.*mul$", name) for name in names), names


def test_a_kernel_of_a_tpu_has_the_scopes() -> None:
    """In Mosaic's program a scope begins and ends with an operation that XProf shows."""
    pytest.importorskip("libtpu", reason="needs libtpu")
    text = energies.trace(X).lower("tpu:v5e").text
    starts = re.findall(r'tpu\.trace_start.*message = "([^"]*)"', text)
    assert {"sums", "weights", "roots"} <= set(starts), text
    assert len(starts) == len(re.findall(r"tpu\.trace_stop", text))


def test_the_source_of_a_gpu_names_regions_in_comments() -> None:
    pytest.importorskip("triton", reason="needs triton")
    text = energies.trace(X).lower("cuda:sm_90").text
    for part, region in (("tl.exp", "sums/weights"), ("tl.sum", "sums"), ("tl.sqrt", "roots")):
        comment = re.findall(r"# test_named_regions\.py:\d+(.*)", text[: text.index(part)])[-1]
        assert comment == f" in {region}", text


@pytest.mark.parametrize(
    ("target", "package"), [("cpu:llvm", "llvmlite"), ("cuda:sm_90", "triton"), ("tpu:v5e", "libtpu")]
)
def test_an_explanation_has_the_shares_of_regions(target: str, package: str) -> None:
    pytest.importorskip(package, reason=f"needs {package}")
    explanation = energies.trace(X).lower(target).explain(0)
    assert sum(explanation.regions.values()) == pytest.approx(1.0)
    assert {"sums/weights", "roots"} <= set(explanation.regions)
    text, page = str(explanation), explanation.html()
    assert re.search(r"regions\n(.*\n)*.* sums/weights\n", text) and "<h2>Regions</h2>" in page
    assert explanation.as_dict()["regions"] == explanation.regions


def test_an_explanation_without_regions_has_no_shares_of_regions() -> None:
    pytest.importorskip("llvmlite", reason="needs llvmlite")

    @tk.kernel(out_type=lambda x: x)
    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    explanation = double.trace(X).lower("cpu:llvm").explain(0)
    assert explanation.regions == {} and "regions" not in str(explanation).split("memory")[0]
    assert "<h2>Regions</h2>" not in explanation.html()


def _named(regions: NamedRegions, *paths: str) -> list[str]:
    """The name stack of an operation that is emitted in ops of these regions, one inside the other."""

    def emit(x: Any, rest: tuple[str, ...]) -> Any:
        if not rest:
            return jnp.sin(x)
        op: Op = Iota(shape=(1,), dtype=jnp.dtype("int32"), dim=0, loc=Loc("a.py", 1, region=rest[0]))
        with regions.around(op):
            return emit(x, rest[1:])

    jaxpr = jax.make_jaxpr(lambda x: emit(x, paths))(1.0)
    return [str(eqn.source_info.name_stack) for eqn in jaxpr.eqns]


@pytest.mark.parametrize(
    ("paths", "scope"),
    [
        (("",), ""),
        (("a",), "a"),
        (("a", "a/b"), "a/b"),
        (("a", "a/b/c"), "a/b/c"),
        (("a/b", "a/b"), "a/b"),
        (("a", ""), "a"),
        (("a", "b"), "a/b"),  # an op that a pass moved into another op's block
    ],
)
def test_scopes_are_added_to_those_around(paths: tuple[str, ...], scope: str) -> None:
    regions = NamedRegions()
    assert _named(regions, *paths) == [scope]
    assert _named(regions, "x") == ["x"]  # nothing stays open
