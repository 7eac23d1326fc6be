"""The errors of `flash_attention`'s features, in the caller's terms and at the caller's line."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from tilekern.errors import ArgumentError
from tilekern.kernels.flash_attention import block_map, flash_attention

pytestmark = pytest.mark.one_backend

Q, K, V = (np.zeros(shape, np.float32) for shape in ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)))
TABLE = np.zeros((4, 7), np.float32)


def of_distance(table: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + table[n, j - i]


def of_all(table: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + table.sum()


def of_two(table: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + table[n // 2, i, j]


def short(table: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + table[n]


def by_key(table: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + table[n, j]


def twice(table: Any, s: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return s + table[j, j]


def seen(table: Any, b: Any, n: Any, i: Any, j: Any) -> Any:
    return table[i]


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "bias of three keys": ({"bias": np.zeros((2, 4, 5, 3), np.float32)}, "bias", "float32[2, 4, 5, 3]"),
    "bias without a dim": ({"bias": np.zeros((5, 7), np.float32)}, "bias", "float32[5, 7]"),
    "bias of ints": ({"bias": np.zeros((1, 1, 5, 7), np.int32)}, "bias", "int32[1, 1, 5, 7]"),
    "mask of floats": ({"mask": np.zeros((1, 1, 5, 7), np.float32)}, "mask", "float32[1, 1, 5, 7]"),
    "mask of three heads": ({"mask": np.zeros((2, 3, 5, 7), bool)}, "mask", "bool[2, 3, 5, 7]"),
    "negative window": ({"window": (-1, 0)}, "window", "(-1, 0)"),
    "window of one": ({"window": 3}, "window", "3"),
    "window of floats": ({"window": (1.5, 0)}, "window", "1.5"),
    "one array of segments": ({"segment_ids": np.zeros((2, 5), np.int32)}, "segment_ids", "int32[2, 5]"),
    "segments of floats": ({"segment_ids": (np.zeros((2, 5)), np.zeros((2, 7)))}, "segment_ids", "float64[2, 5]"),
    "lengths of one": ({"q_lengths": np.zeros(3, np.int32)}, "q_lengths", "int32[3]"),
    "negative lengths": ({"kv_lengths": np.array([3, -1])}, "kv_lengths", "-1"),
    "lengths of floats": ({"kv_lengths": np.zeros(2, np.float32)}, "kv_lengths", "float32[2]"),
    "softcap of 0": ({"softcap": 0.0}, "softcap", "0.0"),
    "sinks of two": ({"sinks": np.zeros(2, np.float32)}, "sinks", "float32[2]"),
    "dropout without a key": ({"dropout_rate": 0.1}, "dropout_key", "None"),
    "dropout of more than all": ({"dropout_rate": 1.5}, "dropout_rate", "1.5"),
    "broadcast dropout by a number": ({"dropout_broadcast": 1}, "dropout_broadcast", "1"),
    "key of another kind": (
        {"dropout_rate": 0.1, "dropout_key": jax.random.key(0, impl="rbg")},
        "dropout_key",
        "dropout_key",
    ),
    "mask_mod of floats": ({"mask_mod": lambda b, n, i, j: (i - j) * 1.0}, "mask_mod", "float32[2, 3]"),
    "mask_mod that is none": ({"mask_mod": 3}, "mask_mod", "3"),
    "score_mod of bools": ({"score_mod": lambda s, b, n, i, j: s > 0}, "score_mod", "bool[2, 3]"),
    "score_mod of another shape": (
        {"score_mod": lambda s, b, n, i, j: jnp.zeros((4, 3))},
        "score_mod",
        "float32[4, 3]",
    ),
    "read at j - i": ({"score_mod": Partial(of_distance, TABLE)}, "carries", "index"),
    "read as a whole": ({"score_mod": Partial(of_all, TABLE)}, "carries", "sum"),
    "read at n // 2, i, j": ({"score_mod": Partial(of_two, np.zeros((2, 5, 7)))}, "made of b or n", "i, j"),
    "read with too few indices": ({"score_mod": Partial(short, TABLE)}, "carries", "1 indices"),
    "read past its end": ({"score_mod": Partial(by_key, TABLE[:, :6])}, "does not fit where", "float32[4, 6]"),
    "read twice at j": ({"score_mod": Partial(twice, np.zeros((7, 7)))}, "does not fit where", "[7, 7]"),
    "mask read past its end": ({"mask_mod": Partial(seen, np.zeros(4, bool))}, "does not fit where", "bool[4]"),
    "precision unknown": ({"precision": "fast"}, "precision", "fast"),
    "three precisions": ({"precision": (None, None, None)}, "precision", "None"),
    "blocks unknown": ({"block_x": 3}, "block_x", "3"),
    "backward blocks of 0": ({"backward_block_q": 0}, "backward_block_q", "0"),
    "map of other sizes": (
        {"mask_mod": lambda b, n, i, j: i >= j, "block_map": block_map(lambda b, n, i, j: i >= j, queries=300, keys=7)},
        "block_map",
        "live_keys",
    ),
    "block across a map": (
        {
            "mask_mod": lambda b, n, i, j: i >= j,
            "block_map": block_map(lambda b, n, i, j: i >= j, queries=5, keys=7, block_q=4, block_k=4),
            "backward_block_k": 3,
        },
        "does not divide",
        "a block of 3 keys",
    ),
    "map without a mask": (
        {"block_map": block_map(lambda b, n, i, j: i >= j, queries=5, keys=7)},
        "block_map",
        "mask_mod None",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    keywords, summary, got = WRONG[name]
    with pytest.raises(ArgumentError) as caught:
        flash_attention(Q, K, V, **keywords)  # this line
    error = caught.value
    assert summary in error.summary and got in error.got and error.expected and error.fix
    assert error.loc.file == __file__
    # What a function of the user does is shown where it does it.
    line = "table" if "carries" in error.summary else "# this line"
    assert line in error.loc.snippet()


def test_a_traced_mask_mod_may_not_change_the_shape() -> None:
    with pytest.raises(ArgumentError, match="mask_mod"):
        jax.jit(lambda q: flash_attention(q, K, V, mask_mod=lambda b, n, i, j: jnp.ones((5, 7), bool)))(Q)


def test_a_mod_that_branches_in_python() -> None:
    def mod(b: Any, n: Any, i: Any, j: Any) -> Any:
        return True if i >= j else b == n

    with pytest.raises(ArgumentError, match="cannot take this mask_mod") as caught:
        flash_attention(Q, K, V, mask_mod=mod)
    error = caught.value
    assert "`if`" in error.expected and "truth value" in error.got and "jnp.where" in error.fix
    assert (error.loc.file, error.loc.line) == (__file__, mod.__code__.co_firstlineno + 1)


@pytest.mark.parametrize(
    ("name", "mod", "takes"),
    [
        ("mask_mod", lambda i, j: i >= j, "(b, n, i, j)"),
        ("score_mod", lambda b, n, i, j: i - j, "(score, b, n, i, j)"),
        ("mask_mod", Partial(lambda b, n, i, j: i >= j, TABLE), "(b, n, i, j) after 1 that it carries"),
    ],
)
def test_a_mod_of_another_arity(name: str, mod: Any, takes: str) -> None:
    with pytest.raises(ArgumentError, match=f"cannot take this {name}") as caught:
        flash_attention(Q, K, V, **{name: mod})  # here
    error = caught.value
    assert takes in error.expected and "a function of (" in error.got and "in this order" in error.fix
    assert error.loc.file == __file__ and "# here" in error.loc.snippet()


@pytest.mark.parametrize("name", ["scale", "softcap"])
@pytest.mark.parametrize("number", [10**400, -(10**4000), "a"], ids=["large", "huge", "text"])
def test_a_number_that_no_float_holds(name: str, number: Any) -> None:
    with pytest.raises(ArgumentError, match=f"cannot take this {name}") as caught:
        flash_attention(Q, K, V, **{name: number})  # here
    assert caught.value.got.startswith(f"{name} = ") and "# here" in caught.value.loc.snippet()
