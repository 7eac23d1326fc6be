"""Factors: the dims of arrays that devices may divide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tests.autodiff.kernels import CASES as USERS
from tests.lang.checks import like_first
from tests.lower.library import CASES, NAMES, family_of
from tilekern.kernel.sharding_rule import ShardingRule

LIBRARY = {
    "adamw_step": "axis0 axis1, axis0 axis1, axis0 axis1, axis0 axis1, factors.0 "
    "-> axis0 axis1, axis0 axis1, axis0 axis1",
    "causal_conv1d": "b x.1 c, weight.0 c, c -> b out.1 c",
    "cross_entropy": "i hidden.1, weight.0 weight.1, i -> i, i",
    "distillation": "i hidden.1, weight.0 weight.1, i teacher.1, teacher_weight.0 teacher_weight.1 -> i, i, i, i",
    "flash_attention": "b query.1 g query.3, b key.1 g key.3, b value.1 g value.3 -> b out.1 g out.3",
    "gated_delta_rule": "b query.1 query.2 query.3, b key.1 key.2 key.3, b value.1 n j, b beta.1 n, b log_decay.1 n "
    "-> b out.1 n j, b n final_state.2 j",
    "group_norm": "axis0 x.1 axis1, axis1, axis1 -> axis0 out.1 axis1",
    "index_scores": "t query.1 query.2, t weights.1, keys.0 keys.1 keys.2, t, t, places.pages.0 places.pages.1 "
    "-> t out.1",
    "layer_norm": "i x.1, weight.0, bias.0 -> i out.1",
    "linear_attention": "b query.1 query.2 query.3, b key.1 key.2 key.3, b value.1 n j, b log_decay.1 n "
    "-> b out.1 n j, b n final_state.2 j",
    "matmul": "axis0 k, k axis1 -> axis0 axis1",
    "paged_attention": "query.0 g query.2 query.3, cache.keys.0 cache.keys.1 g cache.keys.3, tables.starts.0, "
    "tables.lengths.0, tables.pages.0 tables.pages.1, tables.count.0 -> largest.0 largest.1 g largest.3, "
    "total.0 total.1 g total.3, weighted.0 weighted.1 g weighted.3 weighted.4",
    "mla_attention": "query.latent.0 query.latent.1 n query.latent.3, cache.latent.0 cache.latent.1 cache.latent.2, "
    "tables.starts.0, tables.lengths.0, tables.pages.0 tables.pages.1, tables.count.0 "
    "-> largest.0 largest.1 largest.2 n, total.0 total.1 total.2 n, weighted.0 weighted.1 weighted.2 n weighted.4",
    "rg_lru": "b x.1 j, b input_gate.1 j, b recurrence_gate.1 j, j -> b out.1 j, b j",
    "selective_scan": "i x.1 j, i dt.1 j, j a.1, i b.1 b.2, i c.1 c.2, j, i z.1 j, j -> i out.1 j, i j final_state.2",
    "ragged_dot": "lhs.0 k, rhs.0 k j, ends.0 -> out.0 j",
    "rms_norm": "i x.1, weight.0 -> i out.1",
    "rope": "b x.1 n x.3, frequencies.0 -> b out.1 n out.3",
    "sample": "r logits.1, r keys.1, r, r -> r",
    "softmax": "i x.1 -> i out.1",
    "swiglu": "i j, i j -> i j",
}
OF_USERS = {
    "pointwise": "i, i -> i",
    "norm": "i x.1, w.0 -> i out.1",
    "product": "axis0 k, k axis1 -> axis0 axis1",
    "product and bias": "axis0 x.1, axis1 w.1 -> axis0 axis1",  # the sum over k is in a sine
    "softmax": "i x.1 -> i out.1",
    "attention": "q.0 q.1, k.0 k.1, v.0 v.1 -> out.0 out.1",  # causal: positions decide
    "two passes": "i q.1, k.0 k.1, v.0 v.1 -> i out.1",
    "lookup": "table.0 table.1, i -> i out.1",
    "recurrence": "x.0 c, a.0 c -> out.0 c",
    "stencil": "x.0 -> out.0",
    "sums and zeros": "x.0 x.1, w.0 -> total.0, part.0 part.1",
    "dropout": "x.0, key.0 -> out.0",
    "ordered": "i x.1 -> i out.1, i best.1",
    "heads": "i x.1, w.0 w.1 -> i out.1",
    "overwritten": "x.0, y.0 -> out.0, last.0",
    "last of loop": "x.0 -> out.0",
    "halves": "x.0 x.1, y.0 y.1 -> out.0 out.1",
    "nested": "i x.1, w.0 w.1 -> i",
}


def first_line(rule: ShardingRule | None) -> str:
    return str(rule).splitlines()[0]


@pytest.mark.parametrize("name", NAMES)
def test_rules_of_the_library(name: str) -> None:
    assert first_line(family_of(name, CASES[name][0].small(), "float32").sharding) == LIBRARY[name]


@pytest.mark.parametrize("case", USERS, ids=lambda c: c.name)
def test_rules_of_users_kernels(case: Any) -> None:
    rule = case.kernel.sharding_rule(*case.arrays(dtype=np.float32), *case.rest)
    assert first_line(rule) == OF_USERS[case.name]


def test_a_matrix_product_is_summed_over_the_inner_dim() -> None:
    (case,) = (c for c in USERS if c.name == "product")
    rule = case.kernel.sharding_rule(*case.arrays(dtype=np.float32))
    assert str(rule) == "axis0 k, k axis1 -> axis0 axis1\nsummed over: k"
    assert rule.sums["k"] == {0} and not rule.sums["axis0"]


X = jnp.ones((16, 8))


def rows(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :]


def shifted(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[tk.ds(i.index * 4 + 1, 4), :]


def position(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] + i.indices[:, None]


def one_tile(x, out):
    """The index of the only tile is 0 in each part, and so is the first row of each."""
    i = tk.parallel(x.shape[0], 16)
    out[i, :] = x[i, :] + i.indices[:, None]


def valid(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = jnp.where(i.valid[:, None], x[i, :], 1)


def other_mask(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = jnp.where(i.indices[:, None] < 15, x[i, :], 1)


def size(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] / x.shape[0]


def branch(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] if x.shape[0] > 8 else -x[i, :]


def pairs(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] + x[:, :].sum(axis=0)[None]


def printed(x, out):
    i = tk.parallel(x.shape[0], 4)
    tk.debug_print("{}", i.index)
    out[i, :] = x[i, :]


def chosen(x, out):
    i = tk.parallel(x.shape[0], 4)

    @tk.when(i.index >= 0)
    def _():
        out[i, :] = x[i, :]


def square_position(x, out):
    """Row i² of x, whose rows are as many as squares need: no part of x has the rows of a part of the programs."""
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] + x[tk.ds(i.index * i.index, 1), :]


def beside_position(x, out):
    """The square moves a whole tile of x along columns, which no device divides."""
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = x[i, :] + x[i, tk.ds(i.index * i.index, 4)].sum(axis=1)[:, None]


def of_part(x, out):
    i = tk.parallel(x.shape[0], 4)
    out[i, :] = tk.fold(tk.serial(8, 2, start=2), lambda k, t: t + x[i, k].sum(axis=1), tk.zeros(i, x.dtype))[:, None]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (rows, ""),
        (shifted, "its position in x is not that of a tile alone"),
        (position, "the body computes with its index (convert)"),
        (one_tile, "the body computes with its index (convert)"),
        (valid, ""),
        (other_mask, "the body computes with its index (lt)"),
        (size, "the body depends on its size (a number that it computes with: 16.0 for all, 8.0 for a part)"),
        (branch, "the body depends on its size (the number of operations)"),
        (pairs, "x is read or written as a whole by each program"),
        (printed, "the body computes with its index (print)"),
        (chosen, "the body computes with its index"),
        (square_position, "the body computes with its index"),
        (beside_position, "the body computes with its index"),
        (of_part, ""),
    ],
)
def test_the_reasons_of_rows(body: Callable[..., None], reason: str) -> None:
    rule = like_first(body).sharding_rule(X)
    assert ("i" in rule.sizes) == (not reason)
    assert rule.reasons.get("i", "").startswith(reason)


def sums(kind: str) -> Any:
    """A product whose sum over k is used in some way."""

    def body(x, w, out):
        i = tk.parallel(x.shape[0], 4)

        def step(k, total):
            product = tk.dot(x[i, k], w[k, :], jnp.zeros((4, 8)))
            if kind == "scaled carry":
                return 0.5 * total + product
            return (jnp.maximum(total, 1) if kind == "maximum" else total) + product

        start = jnp.ones((4, 8)) if kind == "start" else jnp.zeros((4, 8))
        total = tk.fold(tk.serial(x.shape[1], 4), step, start)
        out[i, :] = {
            "linear": lambda: (2 * total).astype(jnp.bfloat16).astype(jnp.float32),
            "bias": lambda: total + 1,
            "square": lambda: total * total,
            "root": lambda: jnp.sqrt(total),
            "chosen": lambda: jnp.where(total > 0, total, 0),
        }.get(kind, lambda: total)()

    return tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], 8), x.dtype))(body)


@pytest.mark.parametrize(
    "kind", ["sum", "linear", "scaled carry", "maximum", "start", "bias", "square", "root", "chosen"]
)
def test_sums_over_a_loop(kind: str) -> None:
    rule = sums(kind).sharding_rule(X, jnp.ones((8, 8)))
    assert ("k" in rule.sizes) == (kind in ("sum", "linear"))
    assert "i" in rule.sizes


# --- results that depend on where tiles begin -------------------------------------------------------------------------


def tile_by_tile(kind: str, block: int) -> Any:
    """Rows 16 or 18, in tiles of `block`; some results depend on which rows are in a tile."""

    def body(x, out):
        i = tk.parallel(x.shape[0], block)
        tile = x[i, :]
        out[i, :] = {
            "row": lambda: tile / tile.sum(axis=1, keepdims=True),
            "mean of tile": lambda: tile - tile.mean(axis=0, keepdims=True),
            "maximum of tile": lambda: tile - tile.max(axis=0),
            "order in tile": lambda: jnp.sort(tile, axis=0),
            "order in row": lambda: jnp.sort(tile, axis=1),
            "shift in tile": lambda: jnp.concatenate([tile[1:], tile[:1]]),
            "relu": lambda: jax.nn.relu(tile),  # with a derivative of its own
            "stop": lambda: tile * jax.lax.stop_gradient(tile),
            "shift in row": lambda: jnp.concatenate([tile[:, 1:], tile[:, :1]], axis=1),
            "product of rows": lambda: tile @ (tile.T @ tile),
            "count of rows": lambda: tile * i.valid.sum(),
        }[kind]()

    return like_first(body)


@pytest.mark.parametrize("kind", ["row", "order in row", "shift in row", "relu", "stop"])
def test_rows_by_themselves_are_divided_anywhere(kind: str) -> None:
    assert tile_by_tile(kind, 4).sharding_rule(X).sizes["i"] == {16}


@pytest.mark.parametrize(
    "kind", ["mean of tile", "maximum of tile", "order in tile", "shift in tile", "product of rows", "count of rows"]
)
def test_what_combines_the_rows_of_a_tile_is_divided_between_tiles(kind: str) -> None:
    assert tile_by_tile(kind, 4).sharding_rule(X).sizes["i"] == {16, 4}
    rule = tile_by_tile(kind, 4).sharding_rule(jnp.ones((18, 8)))
    assert rule.reasons["i"] == "the lanes of a tile are combined, and its tiles are not all whole"


@pytest.mark.parametrize(
    ("kind", "anywhere"), [("sum", True), ("weighed", True), ("maximum", False), ("square", False), ("count", False)]
)
def test_sums_over_programs(kind: str, anywhere: bool) -> None:
    @tk.kernel(out_type=lambda x: tk.Sum(jax.ShapeDtypeStruct((8,), x.dtype)))
    def total(x, out):
        i = tk.parallel(x.shape[0], 4)
        tile = x[i, :]
        value = {
            "sum": lambda: tile.sum(axis=0),
            "weighed": lambda: 3 * (tile * tile).sum(axis=0),
            "maximum": lambda: tile.max(axis=0),
            "square": lambda: tile.sum(axis=0) ** 2,
            "count": lambda: jnp.ones(8),
        }[kind]()
        out.at[:].add(value)

    assert total.sharding_rule(X).sizes["i"] == ({16} if anywhere else {16, 4})


@pytest.mark.parametrize(("kind", "anywhere"), [("dot", True), ("sum", True), ("square", False), ("maximum", False)])
def test_sums_over_the_tiles_of_a_loop(kind: str, anywhere: bool) -> None:
    @tk.kernel(out_type=lambda x, w: jax.ShapeDtypeStruct((x.shape[0], 8), x.dtype))
    def summed(x, w, out):
        i = tk.parallel(x.shape[0], 4)

        def step(k, total):
            tile = x[i, k]
            return (
                total
                + {
                    "dot": lambda: tk.dot(tile, w[k, :]),
                    "sum": lambda: (tile[:, :, None] * w[k, :]).sum(axis=1),
                    "square": lambda: tk.dot(tile, w[k, :]) ** 2,
                    "maximum": lambda: tile.max(axis=1)[:, None] + 0 * w[k, :].max(axis=0),
                }[kind]()
            )

        out[i, :] = tk.fold(tk.serial(x.shape[1], 2), step, jnp.zeros((4, 8)))

    assert summed.sharding_rule(X, jnp.ones((8, 8))).sizes["k"] == ({8} if anywhere else {8, 4})


def test_a_sum_that_is_loaded_again() -> None:
    """The load has an addend on each device: a product of both is no addend of the product of sums."""

    @tk.kernel(out_type=lambda x: (jax.ShapeDtypeStruct((), x.dtype),) * 2)
    def squared(x, total, square):
        once = tk.fold(tk.serial(x.shape[0], 4), lambda k, t: t + x[k, :].sum(), jnp.zeros((), x.dtype))
        total[()] = once
        square[()] = once * total[()]

    assert squared.sharding_rule(X).reasons["k"] == "a loop over it carries values that are not sums alone"


def test_an_array_that_the_body_closes_over_is_whole() -> None:
    table = jnp.ones((16, 8))

    @like_first
    def plus(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i, :] = x[i, :] * jnp.asarray(table)[0]

    assert "i" in plus.sharding_rule(X).sizes


def test_calls_that_have_no_rule() -> None:
    x = jnp.ones((8, 2), jnp.int4)
    assert like_first(lambda x, out: out.__setitem__(..., x[...])).sharding_rule(x) is None


def test_a_batch_is_divided() -> None:
    family = like_first(rows).trace(X)._kernel
    batched, _ = family.batched(5, (1,))
    assert first_line(batched.sharding) == "i batch x.1 -> batch i out.1"
    assert batched.sharding.sizes["batch"] == {5}


@pytest.mark.parametrize(
    ("notation", "parts"),
    [
        ("i -> i j", {"summary": "does not fit its arrays", "expected": "'. . -> . .'", "got": "'i -> i j'"}),
        ("i j", {"summary": "does not fit its arrays", "got": "'i j'"}),
        ("i j, k -> i j", {"summary": "does not fit its arrays"}),
        ("i . -> i k", {"summary": "has a name", "got": "k of sizes [8]", "fix": "a dot"}),
        ("i i -> i .", {"summary": "has a name", "got": "i of sizes [8, 16]"}),
        ("i-1 . -> . .", {"summary": "has a name", "expected": "an identifier"}),
    ],
)
def test_stated_rules_that_do_not_fit(notation: str, parts: dict[str, str]) -> None:
    kernel = like_first(rows)
    kernel.defsharding(lambda x: notation)
    with pytest.raises(tk.errors.ArgumentError) as raised:
        kernel.sharding_rule(X)
    for name, part in parts.items():
        assert part in getattr(raised.value, name)


def test_a_rule_for_shardy_names_sizes_of_dims_in_parts() -> None:
    """Of a dim of groups × channels the number of groups, unless a dim has it; nothing divides what has a dim of 1."""
    sizes = {"g": frozenset({8, 48}), "p": frozenset({1, 9})}
    x, y, z = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 48), (8,), (9, 1)))
    rule = ShardingRule((("x.0", "g"),), (("p", "g"),), sizes, {}, {})
    text, whole, found = rule.as_shardy([x], [jax.ShapeDtypeStruct((9, 48), jnp.float32)])
    assert text == "f0 (f1 f1_1) -> f2 (f1 f1_2)" and whole == ("f0", "f1_1", "f2", "f1_2")
    assert found == {"f1": 8, "f1_1": 6, "f1_2": 6}
    known = ShardingRule((("x.0", "g"), ("g",)), (("p", "p"),), sizes, {}, {}).as_shardy([x, y], [z])
    assert known == ("f0 (f1 f1_1), f1 -> f2 f3", ("f0", "f1_1", "f2", "f3"), {"f1_1": 6})


def test_cotangents_of_an_operand_that_devices_share_are_added_up() -> None:
    """Each device has rows of x, and all of w."""
    rule = ShardingRule((("rows", "x.1"), ("w.0",)), (("rows", "out.1"),), {"rows": frozenset({8})}, {}, {})
    of_both = rule.transposed([True, True])
    assert of_both.operands == rule.results and of_both.results == rule.operands
    assert of_both.sums == {"rows": frozenset({1})}
    of_w = rule.transposed([False, True])
    assert of_w.operands == (("rows", "x.1"), ("rows", "out.1")) and of_w.sums == {"rows": frozenset({0})}


def test_the_least_number_of_parts_divides_all_sizes_of_a_name() -> None:
    sizes = {"pairs": frozenset({6, 4}), "threes": frozenset({9, 15}), "whole": frozenset({8, 9})}
    assert ShardingRule((), (), sizes, {}, {}).least_parts(sizes) == {"pairs": 2, "threes": 3}
