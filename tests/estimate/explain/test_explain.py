"""Explanations: what each line became, the parts of lines, the memory, and changes that help."""

import inspect
import json
import sys
from functools import cache
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.estimate import kernels
from tests.estimate.kernels import product, row_sums, types
from tests.lang.checks import refused
from tilekern.errors import ArgumentError, EstimateError, TargetError
from tilekern.estimate import Estimate
from tilekern.estimate.explain import Explanation, Listing, Variants, explain, on_tpu
from tilekern.estimate.explain.changes import Trials, default_budget, try_changes
from tilekern.estimate.explain.explainer import Explainer, Forecast, explainer_of
from tilekern.estimate.explain.lines import Shares
from tilekern.lower.backend import Backend
from tilekern.lower.target import BACKENDS, Target, resolve

needs_llvm = pytest.mark.skipif(find_spec("llvmlite") is None, reason="needs llvmlite")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs libtpu")
TARGETS = [
    pytest.param("cpu:llvm", marks=needs_llvm),
    pytest.param("cuda:sm_90", marks=needs_triton),
    pytest.param("tpu:v5e", marks=needs_libtpu),
]
SOURCE = inspect.getsource(kernels).splitlines()
LINES = {
    name: next(n for n, line in enumerate(SOURCE, 1) if code in line)
    for name, code in {"dot": "tk.dot(x[i, k]", "loop": "out[i, j] = tk.fold"}.items()
}


@tk.kernel(out_type=lambda x, i, n: tk.Zeros(jax.ShapeDtypeStruct((n.shape[0], x.shape[1]), x.dtype)))
def scatter(x: Any, i: Any, n: Any, out: Any, *, block: tk.Block = 16) -> None:
    """Rows of x, added up at the rows n."""
    r = tk.parallel(i.shape[0], block)
    rows = x[i[r]]
    out.at[n[r]].add(rows, ordered=False)


@cache
def explained(target: str, budget: float = 0.0) -> Explanation:
    shapes = types((512, 512), (512, 256), dtype=jnp.bfloat16)
    return product.trace(*shapes).lower(target).explain(budget)


def said(explanation: Explanation) -> dict[int, str]:
    return {line.line: "; ".join(line.became) for line in explanation.lines}


@pytest.mark.parametrize("target", TARGETS)
def test_every_part_of_the_work_has_a_line(target: str) -> None:
    explanation = explained(target)
    shares = {line.line: line.share or 0.0 for line in explanation.lines}
    assert sum(shares.values()) == pytest.approx(1.0)
    assert max(shares, key=lambda n: shares[n]) == LINES["dot"] and shares[LINES["dot"]] > 0.7
    (dot,) = [line for line in explanation.lines if line.line == LINES["dot"]]
    assert "tk.dot(x[i, k], w[k, j])" in dot.text and dot.file.endswith("kernels.py")


@pytest.mark.parametrize("target", TARGETS)
def test_lines_say_what_they_became(target: str) -> None:
    lines = said(explained(target))
    dot = {
        "cpu:llvm": ("microkernel of", "x: load without a mask"),
        "cuda:sm_90": ("x: TMA load of [64, 64]", "matrix units (wgmma)"),
        "tpu:v5e": ("matrix units (MXU)", "x: blocked"),
    }[target]
    assert all(words in lines[LINES["dot"]] for words in dot), lines
    assert "loop" in lines[LINES["loop"]] and "out: " in lines[LINES["loop"]]


@pytest.mark.parametrize("target", TARGETS)
def test_an_explanation_is_text_and_json(target: str) -> None:
    explanation = explained(target)
    record = json.loads(json.dumps(explanation.as_dict()))
    assert record["target"] == target and record["estimate"]["bound"] == explanation.estimate.bound  # pyright: ignore[reportOptionalMemberAccess]
    assert len(record["lines"]) == len(explanation.lines)
    assert "\x1b[" in explanation.text(colour=True) and "\x1b[" not in str(explanation)
    assert "memory" in str(explanation) and "tk.dot" in str(explanation)


@needs_triton
def test_gathers_atomics_and_masks_are_named() -> None:
    shapes = types((8, 100), (333,), (333,))
    explanation = scatter.trace(*shapes).lower("cuda:sm_90").explain(0)
    words = "; ".join(said(explanation).values())
    assert "x: gather, a position for each lane" in words and "i: load through pointers, masked" in words
    assert "out: atomic" in words


@needs_triton
def test_a_loop_without_values_is_explained_without_an_estimate() -> None:
    program = row_sums.trace(*types((64, 512), (64,))).lower("cuda:sm_90")
    explanation = program.explain(0)
    assert explanation.estimate is None and "the values of n decide" in explanation.unestimated
    assert all(line.share is None for line in explanation.lines) and "no estimate: the values of n" in str(explanation)
    assert program.explain(0, n=256).estimate is not None
    with pytest.raises(ArgumentError, match="has no input of this name"):
        program.explain(0, m=256)


def test_the_portable_backend_is_not_explained() -> None:
    with pytest.raises(EstimateError, match="no model of programs of the portable backend"):
        product.trace(*types((64, 64), (64, 64))).lower("cpu:xla").explain()


def explainer_module(explanation: Explanation, calls: list[str]) -> ModuleType:
    """A module for `Backend.explainer`, which tells as much as an explanation does, and notes what it is asked."""
    module, place = ModuleType("explainer_of_other"), (explanation.lines[0].file, explanation.lines[0].line)

    def forecast(lowering: Any, target: Target, values: Any) -> Forecast:
        calls.append(f"forecast for {target.name}")
        if "n" in {param.name for param in lowering.func.inputs}:
            raise EstimateError("no numbers", expected="a kernel without n", got="n", fix="leave it out")
        assert explanation.estimate is not None
        return Forecast(explanation.estimate, Shares({place: 1.0}, {}), "turns of the other machine")

    def programs(lowering: Any, numbers: Any) -> dict[str, Listing]:
        calls.append("programs")
        return {"program": Listing("halt", (numbers[place],))}

    functions = {
        "forecast": forecast,
        "became": lambda lowering: {place: {"a loop of the other machine": None}},
        "memory": lambda lowering: {"heap": "all of it"},
        "programs": programs,
    }
    vars(module).update(functions)
    return module


@needs_llvm
def test_a_backend_of_another_package_explains_its_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    module, target = explainer_module(explained("cpu:llvm"), calls), Target("cpu:other", "cpu", "other")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    record = Backend("other", (target,), lower=lambda *unused: None, explainer=module.__name__)  # pyright: ignore[reportArgumentType]
    monkeypatch.setitem(BACKENDS, "other", record)
    program = product.trace(*types((64, 64), (64, 64))).lower("cpu:xla")
    explanation = explain(cast(Any, SimpleNamespace(func=program.ir)), target, [None, None], {})
    assert calls == ["forecast for cpu:other"]
    assert [(line.became, line.share) for line in explanation.lines] == [(("a loop of the other machine",), 1.0)]
    assert (explanation.shares_of, explanation.memory) == ("turns of the other machine", {"heap": "all of it"})
    assert "heap" in str(explanation) and "programs" not in calls, "text shows no program, so none is compiled for it"
    assert (
        explanation.listings["program"] == Listing("halt", (0,)) and "func @" in explanation.listings["block IR"].text
    )
    assert calls[1:] == ["programs"], "they are compiled once"
    rows = row_sums.trace(*types((64, 512), (64,))).lower("cpu:xla")
    unestimated = explain(cast(Any, SimpleNamespace(func=rows.ir)), target, [None, None], {"n": 8})
    assert (unestimated.estimate, unestimated.unestimated, unestimated.lines[0].share) == (None, "no numbers", None)


@pytest.mark.parametrize("backend", [b for b in BACKENDS.values() if b.explainer], ids=lambda b: b.name)
def test_explainers_have_all_functions(backend: Backend) -> None:
    assert backend.estimator, "an explanation has an estimate"
    explainer = explainer_of(backend.targets[0])
    for name in ("forecast", "became", "memory", "programs"):
        declared, own = (list(inspect.signature(getattr(x, name)).parameters) for x in (Explainer, explainer))
        assert declared == ["self", *own]


@needs_llvm
def test_a_bad_block_is_found() -> None:
    """Two tasks of three take two threads as long as four: half the block is faster on any even number of threads."""
    from tilekern.estimate.cpu.peak import THREADS

    @tk.kernel(out_type=lambda x: x)
    def double(x: Any, out: Any, *, block: tk.Block = 4096) -> None:
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i] * 2

    rows = 4096 * THREADS + 4096
    explanation = double.trace(jax.ShapeDtypeStruct((rows,), jnp.float32)).lower("cpu:llvm").explain(60.0)
    assert explanation.settings == {"block": 4096} and explanation.tried == 2
    assert [change.setting for change in explanation.changes][:1] == ["block"] and explanation.changes[0].gain > 1.02
    assert "× as fast" in str(explanation)


def test_changes_that_are_refused_or_slower_are_not_proposed() -> None:
    now = Estimate("k", "t", "d", 10.0, {"memory": 1.0}, {}, 1, 1, None, 0)
    seconds = {("a", 8): 20.0, ("a", 2): 5.0, ("b", 6): 9.9, ("num_stages", 3): 8.0, ("num_stages", 1): 4.0}

    def lower(changes: Any) -> Any:
        ((name, after),) = changes.items()
        if name == "c":
            raise TargetError("c is refused")
        return name, after

    def estimate(key: Any) -> Estimate:
        return Estimate("k", "t", "d", seconds.get(key, 10.0), {"memory": 1.0}, {}, 1, 1, None, 0)

    settings = {"a": 4, "b": 3, "c": 16, "num_stages": 2, "num_warps": 16}
    trials = try_changes(Variants(settings, lower), now, estimate, 60.0)
    assert [(c.setting, c.after) for c in trials.changes] == [("num_stages", 1), ("a", 2), ("num_stages", 3)]
    assert trials.refused == {"c = 32": "c is refused", "c = 8": "c is refused"} and trials.tried == 7
    hurried = try_changes(Variants(settings, lower), now, estimate, 0.0)
    larger = ("a = 8", "b = 6", "c = 32", "num_stages = 3")
    assert (hurried.tried, hurried.untried) == (
        0,
        (*larger, "a = 2", "b = 1", "c = 8", "num_stages = 1", "num_warps = 8"),
    )


@needs_llvm
@needs_triton
def test_trials_take_a_second_on_cpus_unless_the_call_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets: list[float] = []

    def try_nothing(variants: Any, now: Any, estimate: Any, budget: float) -> Trials:
        budgets.append(budget)
        return Trials(untried=("rows = 128", "rows = 32"))

    module = sys.modules["tilekern.estimate.explain.explain"]
    monkeypatch.setattr(module, "try_changes", try_nothing)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 7.0))  # the estimate takes no time
    traced = product.trace(*types((64, 64), (64, 64)))
    for target, budget in (("cpu:llvm", None), ("cuda:sm_90", None), ("cpu:llvm", 3.0)):
        explanation = traced.lower(target).explain(budget)
        assert "not tried, for lack of time: rows = 128, rows = 32" in str(explanation)
        assert "Not tried, for lack of time: rows = 128, rows = 32" in explanation.html()
    assert budgets == [1.0, 10.0, 3.0]


@needs_llvm
@pytest.mark.parametrize("budget", [-1, float("nan"), "3"])
def test_a_budget_below_0_is_refused(budget: Any) -> None:
    lowered = product.trace(*types((64, 64), (64, 64))).lower("cpu:llvm")
    with refused(ArgumentError, "cannot be tried for this time"):
        lowered.explain(budget)  # <-


def test_the_last_trial_may_take_twice_as_long_as_the_estimate() -> None:
    for target, spent, budget in (
        ("cpu:llvm", 0.1, 1.0),
        ("cpu:llvm", 0.5, 0.5),
        ("cpu:llvm", 2.0, 0.0),
        ("tpu:v5e", 1.5, 10.0),
        ("cuda:sm_90", 4.0, 3.0),
    ):
        assert default_budget(resolve(target), spent) == pytest.approx(budget)


def test_a_bundle_of_a_tpu_has_four_slots_for_vectors_and_one_for_functions() -> None:
    lowering: Any = SimpleNamespace(target=SimpleNamespace(name="tpu:v5e"))
    matrices, vectors, functions, bandwidth = on_tpu.rates(lowering)
    # https://cloud.google.com/tpu/docs/v5e
    assert (matrices, bandwidth) == (pytest.approx(197e12, rel=0.01), pytest.approx(819e9, rel=0.01))
    assert vectors == 4 * functions == 4 * 8 * 128 * 1.5e9
