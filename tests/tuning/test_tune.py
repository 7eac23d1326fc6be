"""`kernel.tune`: candidates in processes of their own, the result in a file, and calls that use it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tests.lang.checks import refused
from tilekern.errors import ArgumentError, TargetError
from tilekern.kernels.matmul.kernel import matmul
from tilekern.kernels.softmax.kernel import softmax_forward
from tilekern.tuning import target_of

X = jax.ShapeDtypeStruct((256, 64), jnp.float32)


def like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@tk.kernel(out_type=like)
def planted(x: Any, out: Any, *, block: tk.Block = 32) -> None:
    """Twice x; with some blocks slow or wrong."""
    i = tk.parallel(x.shape[0], block)
    if block == 16:  # wrong numbers
        out[i] = x[i] * 2.001
    elif block == 64:  # slower
        out[i] = tk.fold(tk.serial(2000, 1), lambda _, y: jnp.sin(y), x[i]) * 0 + x[i] * 2
    else:
        out[i] = x[i] * 2


@tk.kernel(out_type=like)
def planted_in_schedule(x: Any, out: Any, *, block: tk.Block = 16) -> None:
    """Twice x; with the block of 16 the numbers are wrong."""
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * (2.001 if block == 16 else 2)


def test_a_result_is_saved_and_used_by_calls(tmp_path: Path) -> None:
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    candidates = {"block_rows": [1, 64], "block_columns": [1024]}
    result = softmax_forward.tune(x, target="cpu:llvm", budget=5, candidates=candidates)
    assert result.rows[0].outcome.tried == 3
    result.save(tmp_path / "tuned.json")
    with tk.tuned(tmp_path / "tuned.json") as table:
        assert table == result.tuned
        traced = softmax_forward.trace(x, target="cpu:llvm")
    assert traced.ir.axes[0].block == result.best["block_rows"]
    assert all(word in str(result) for word in ("softmax_forward", "cpu:llvm", "confidence", "×"))


def test_wrong_and_slow_candidates_are_never_chosen() -> None:
    result = planted.tune(X, target="cpu:llvm", budget=5, candidates={"block": [16, 64]})
    assert result.best == {"block": 32}
    assert result.tuned.entries == ()  # nothing better than the schedule's own
    assert any("wrong numbers" in reason for reason in result.rows[0].outcome.refused)


def test_a_reference_finds_wrong_numbers_of_the_schedule_itself() -> None:
    result = planted_in_schedule.tune(
        X, target="cpu:llvm", budget=5, reference=lambda x: 2 * x, candidates=[{"block": 32}]
    )
    assert result.best == {"block": 32}
    assert result.rows[0].outcome.own_seconds is None


@pytest.mark.parametrize("budget", [0, -1, float("nan"), "60"])
def test_a_budget_without_time_is_refused(budget: Any) -> None:
    with refused(ArgumentError, "no time to tune"):
        planted.tune(X, budget=budget)  # <-


@pytest.mark.parametrize("candidates", [[], {}, 7, {"block": 64}, [64]])
def test_what_is_no_list_of_candidates_is_refused(candidates: Any) -> None:
    with refused(ArgumentError, "no candidates to try"):
        planted.tune(X, target="cpu:llvm", candidates=candidates)  # <-


def test_candidates_that_do_not_fit_are_refused() -> None:
    with refused(ArgumentError, "names a block that planted does not have"):
        planted.tune(X, target="cpu:llvm", candidates={"blocks": [64]})  # <-


def test_a_target_that_does_not_exist_is_refused() -> None:
    with refused(TargetError, "there is no such target"):
        planted.tune(X, target="cpu:gpu")  # <-


@tk.kernel(out_type=like)
def squared(x: Any, out: Any, *, block: tk.Block = 32) -> None:
    i = tk.parallel(x.shape[0], block)
    out[i] = x[i] * x[i]


@pytest.mark.slow
def test_derived_gradients_are_tuned_and_calls_use_their_blocks() -> None:
    result = squared.tune(X, target="cpu:llvm", budget=2, gradient=True, reference=lambda x: x * x)
    kernel, gradient = result.rows
    assert (kernel.key.gradient, gradient.key.gradient) == (False, True)
    assert gradient.outcome.tried >= 2
    entry = replace(gradient.entry, settings=(("block", 64),))
    with tk.Tuned((entry,)):
        traced = squared.trace(X, target="cpu:llvm")
        assert traced.ir.axes[0].block == 32
        assert [k.lower("cpu:llvm").ir.axes[0].block for k in traced.gradient().backward] == [64]
    assert [k.lower("cpu:llvm").ir.axes[0].block for k in squared.trace(X).gradient().backward] == [32]


@pytest.mark.slow
def test_the_kernels_of_a_stated_gradient_are_tuned() -> None:
    result = softmax_forward.tune(X, target="cuda:sm_90", budget=1, candidates=[{"block_rows": 2}], gradient=True)
    assert [row.key.kernel for row in result.rows] == ["softmax_forward", "softmax_tangent"]
    assert all(row.by == "estimate" for row in result.rows)


# --- emitters ---------------------------------------------------------------------------------------------------------

H100 = "cuda:sm_90"
LHS = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16)
RHS = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
TRITON = {"emitter": "triton", "block_m": 64, "block_n": 64, "block_k": 64, "num_warps": 4, "num_stages": 3}
GLUON = {"emitter": "gluon", "block_m": 64, "block_n": 256, "block_k": 64, "num_warps": 8}


@pytest.mark.parametrize(
    ("name", "emitter"),
    [(H100, "auto"), (f"{H100}+auto", "auto"), (f"{H100}+triton", ""), (f"{H100}+gluon", "gluon"), ("cuda:sm_80", "")],
)
def test_a_name_without_an_emitter_leaves_it_open(name: str, emitter: str) -> None:
    assert target_of(name).emitter == emitter


@pytest.mark.slow
def test_a_kernel_without_products_has_no_emitters_to_choose_from() -> None:
    pytest.importorskip("triton", reason="needs triton")
    result = planted.tune(X, target=H100, budget=1, candidates={"block": [64]})
    assert (result.rows[0].key.target, result.emitter) == (H100, "")
    assert "emitter" not in str(result)


@pytest.mark.slow
def test_both_emitters_are_tried_and_the_faster_one_is_stored(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs triton")
    result = matmul.tune(LHS, RHS, target=H100, budget=60, candidates=[TRITON, GLUON])
    (row,) = result.rows
    assert (row.key.target, row.by, row.outcome.tried) == (f"{H100}+auto", "estimate", 3)
    assert row.own["emitter"] == result.emitter == "gluon"  # the schedule's own
    assert "emitter" not in result.best


@pytest.mark.slow
def test_a_candidate_that_names_no_emitter_is_tried_with_each() -> None:
    pytest.importorskip("triton", reason="needs triton")
    blocks = {name: value for name, value in GLUON.items() if name != "emitter"}
    result = matmul.tune(LHS, RHS, target=H100, budget=60, candidates=[{**blocks, "num_stages": 2}])
    assert result.rows[0].outcome.tried == 3


def test_an_emitter_that_does_not_exist_is_refused() -> None:
    with refused(ArgumentError, "name an emitter that the target does not have"):
        matmul.tune(LHS, RHS, target=H100, candidates=[{"emitter": "gluten"}])  # <-


def test_a_target_with_one_emitter_has_none_to_choose() -> None:
    with refused(ArgumentError, "names a block that matmul does not have"):
        matmul.tune(LHS, RHS, target=f"{H100}+triton", candidates=[{"emitter": "gluon"}])  # <-
