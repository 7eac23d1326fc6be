"""The comparisons of training kernels, as far as they run without a GPU: results, formulas, and steps in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import adamw, formulas
from bench.gpu import peers, plan, training
from bench.gpu.gradients import step, with_gradients
from bench.gpu.item import Options, lowerings_of
from bench.gpu.speed import Comparison
from tilekern.kernels.gated_delta_rule import reference as delta_scan
from tilekern.kernels.gated_delta_rule.cases import CASES as DELTA_RULES
from tilekern.kernels.linear_attention import reference as linear_scan
from tilekern.kernels.linear_attention import ssd
from tilekern.kernels.linear_attention.cases import CASES as LINEAR_ATTENTIONS
from tilekern.lower.target import TARGETS

COMPARISONS = {item.name: item for item in training.comparisons()}
OPTIMIZERS = [name for name in COMPARISONS if name.startswith("adamw")]


def shapes(function: Any, types: Sequence[Any]) -> list[Any]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(function, *types))]


# --- the list ---------------------------------------------------------------------------------------------------------


def test_all_of_them_are_in_the_plan_behind_what_has_published_aims(options: Options) -> None:
    names = [item.name for item in plan.items(options)]
    places = [names.index(name) for name in COMPARISONS]
    assert len(COMPARISONS) == len(training.comparisons()) and places == sorted(places)
    assert names.index("attention d128 s4096 causal gradient") < places[0]


@pytest.fixture
def options(tmp_path: Any) -> Options:
    return Options(tmp_path, seed=5, seconds=1000.0)


KINDS = (
    *("ssd", "gated_delta_rule", "rg_lru", "selective_scan", "causal_conv1d", "distillation", "fused_ragged_dot"),
    *("group_norm", "add_rms_norm", "rms_norm_rope", "fused_matmul"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_are_timed_forward_and_with_gradient(kind: str) -> None:
    found = [name for name in COMPARISONS if name.split()[0] == kind]
    assert any(name.endswith("gradient") for name in found) and any(not n.endswith("gradient") for n in found)


@pytest.mark.parametrize("name", [name for name in COMPARISONS if name not in OPTIMIZERS])
def test_formulas_have_our_results(name: str) -> None:
    """Results that a peer does not compute would make it faster, and differences are of all results."""
    item = COMPARISONS[name]
    types = jax.eval_shape(item.arrays, jax.random.key(0))
    ours = shapes(item.ours, types)
    found = [peer for peer in item.peers([types]) if peer.name.startswith("xla")]
    assert found and item.aim_of in "".join(peer.name for peer in found)
    for peer in found:
        _, function, _ = peer.make.args  # pyright: ignore[reportFunctionMemberAccess] -- a partial of `by_jax`
        assert [shape for shape, _ in shapes(function, types)] == [shape for shape, _ in ours], peer.name
    if name.endswith("gradient"):
        results = len(ours) - sum(x.dtype.kind not in "iu" for x in types)
        assert results in (-3, -1, 0) or name.startswith("distillation")


# --- formulas ---------------------------------------------------------------------------------------------------------


def close(found: Any, wanted: Any, limit: float = 1e-3) -> None:
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        difference = np.asarray(x, np.float64) - np.asarray(y, np.float64)
        assert np.linalg.norm(difference) <= limit * np.linalg.norm(np.asarray(y, np.float64))


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_the_delta_rule_in_chunks(name: str) -> None:
    groups = {"groups": 2} if name == "qwen3_next" else {"groups": 4}
    case = training.named(DELTA_RULES, name, tokens=64, heads=4, depth=16, width=16, **groups)
    arrays = case.arrays(jax.random.key(0), jnp.float32)
    in_chunks = jax.jit(partial(formulas.gated_delta_rule, chunk=16))
    close(in_chunks(*arrays), jax.jit(delta_scan)(*arrays))


def test_formulas_of_mamba2() -> None:
    case = replace(LINEAR_ATTENTIONS[1], batch=2, tokens=64, heads=4, depth=16, width=8)
    arrays = [x.astype(jnp.float32) for x in training.ssd_arrays(jax.random.key(0), case=case)]
    ours = jax.jit(partial(ssd, target="cpu:xla"))(*arrays)
    for linear in (partial(formulas.linear_attention, chunk=16), linear_scan):
        close(jax.jit(partial(formulas.ssd, by=linear))(*arrays), ours)


# --- gradients --------------------------------------------------------------------------------------------------------


def test_a_step_has_the_gradients_by_float_arrays_for_its_cotangents() -> None:
    def both(x: jax.Array, n: jax.Array, y: jax.Array) -> Any:
        return x * n, y * 2, x.sum()

    x, n, y = jnp.ones(3), jnp.arange(3), jnp.full(3, 5.0)
    out, by_x, by_y = step(both, x, n, y, jnp.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(out, n)
    np.testing.assert_array_equal(by_x, [0, 2, 6])
    np.testing.assert_array_equal(by_y, [0, 0, 0])
    *results, by_x, by_y = step(both, x, n, y, jnp.ones(3), jnp.full(3, 7.0), used=2)
    assert len(results) == 2
    np.testing.assert_array_equal(by_y, [14, 14, 14])


def test_cotangents_of_checks_differ_between_elements() -> None:
    x = jnp.ones((3, 4), jnp.bfloat16)
    _, by_x = with_gradients(lambda x: 2 * x, x)
    assert by_x.dtype == jnp.bfloat16 and len(np.unique(np.asarray(by_x, np.float32))) == 7


# --- steps in place ---------------------------------------------------------------------------------------------------


def small(key: jax.Array, *, dtype: Any) -> Any:
    return training.weights(key, shape=(8, 128), dtype=dtype)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_in_place_are_those_of_the_formula(name: str) -> None:
    item, dtype = COMPARISONS[name], jnp.dtype(name.split()[-1])
    sets = [small(jax.random.key(n), dtype=dtype) for n in range(2)]
    ours = peers.in_place("ours", item.ours, sets)  # pyright: ignore[reportArgumentType] -- it has one
    theirs = peers.in_place("theirs", partial(adamw.formula, stochastic=False), sets)
    for number in (0, 1, 2, 3):  # each set twice: the second step goes on from the first
        pair = ours.call(number), theirs.call(number)
        close(*(weight for weight, _ in pair), limit=0.01)
        close(*(state for _, state in pair), limit=1e-5)
        assert pair[0][1][0] == 1 + number // 2
    np.testing.assert_array_equal(sets[0][0], small(jax.random.key(0), dtype=dtype)[0])  # others start there, too


def test_results_that_were_given_on_are_not_waited_for() -> None:
    sets = [small(jax.random.key(0), dtype=jnp.float32)]
    contestant = peers.in_place("formula", partial(adamw.formula, stochastic=False), sets)
    results = [contestant.call(n) for n in range(3)]
    assert results[0][0].is_deleted() and not results[2][0].is_deleted()
    contestant.wait(results)
    assert contestant.fetch(results[2]).shape == (-(-8 * 128 // peers.STRIDE),)


def test_the_programs_of_a_gradient_are_known_in_advance() -> None:
    """Those of a derived gradient, too, which is no kernel of the library."""
    case = replace(LINEAR_ATTENTIONS[1], batch=1, tokens=64, heads=2, depth=16, width=16)
    arrays = partial(training.ssd_arrays, case=case)
    item = training.gradient("ssd", ssd, arrays, {"xla": partial(formulas.ssd, by=linear_scan)})
    assert isinstance(item, Comparison) and item.ours is not None
    types = jax.eval_shape(item.arrays, jax.random.key(0))
    names = [lowering.func.name for lowering in lowerings_of(item.ours, types, TARGETS["cuda:sm_90"])]
    assert names[0] == "linear_attention_forward" and len(names) > 1
