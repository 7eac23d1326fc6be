import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.recurrences import check, check_decoding, check_gradients, check_packed, packed
from tilekern.errors import ArgumentError
from tilekern.kernels.selective_scan import reference, selective_scan
from tilekern.kernels.selective_scan.cases import CASES, Case
from tilekern.kernels.selective_scan.kernel import selective_scan_forward

BLOCKS = {"block_t": 8, "block_c": 8}
STATES = 5


def problem(tokens: int, dtype: Any = "float32", *, batch: int = 2) -> list[Any]:
    """x, dt, a, b, c, d, z, dt_bias and a state of twelve channels."""
    random = np.random.default_rng(0)
    x, dt, z = random.standard_normal((3, batch, tokens, 12))
    b, c = random.standard_normal((2, batch, tokens, STATES))
    a = -random.uniform(0.1, 4, (12, STATES))
    d, bias = random.standard_normal((2, 12))
    state = random.standard_normal((batch, 12, STATES))
    arrays = [x, dt, a, b, c, d, z, bias - 1, state]
    return [array.astype(jnp.dtype(dtype if n in (0, 1, 3, 4, 6) else np.float32)) for n, array in enumerate(arrays)]


def both(**keywords: Any) -> tuple[Any, Any]:
    """The kernel with small tiles, and its definition."""
    keywords = {"dt_softplus": True, **keywords}
    return partial(selective_scan, **{**BLOCKS, **keywords}), partial(reference, **keywords)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_floats(dtype: str) -> None:
    check(*both(), problem(19, dtype))


@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_lengths(tokens: int) -> None:
    check(*both(), problem(tokens))


@pytest.mark.parametrize(("tokens", "dtype"), [(19, "float32"), (16, "bfloat16")])
def test_gradients(tokens: int, dtype: str) -> None:
    check_gradients(*both(), problem(tokens, dtype))


def test_gradients_of_packed_sequences() -> None:
    ids = packed(23)
    check_gradients(*both(segment_ids=ids), problem(23))


def test_without_options() -> None:
    x, dt, *others = problem(19)
    ours, definition = both(dt_softplus=False)
    check(ours, definition, [x, abs(dt), *others[:3]])
    check_gradients(ours, definition, [x, abs(dt), *others[:3]])


def test_decays_of_0_and_1() -> None:
    """Steps so small and so large that decays are 1 or 0 in floating point."""
    x, dt, *others = problem(9)
    arrays = [x, dt * 200, *others]
    check(*both(), arrays)
    check_gradients(*both(), arrays)


def test_packed_sequences_are_separate_ones() -> None:
    *arrays, state = problem(21, batch=1)
    check_packed(both()[0], arrays, state, 5e-6)


def test_steps_of_decoding_are_one_call_and_blocks_change_rounding_alone() -> None:
    *arrays, state = problem(5)
    check_decoding(partial(selective_scan, dt_softplus=True), arrays, state, 5e-6)


def test_under_vmap_and_checkpoint() -> None:
    x, *others, state = problem(9)

    def loss(x: Any, state: Any, function: Any) -> Any:
        rest = [v[:1] if v.ndim == 3 else v for v in others]
        return jnp.sin(function(x[None], *rest, state[None], dt_softplus=True)[0]).sum()

    ours, theirs = (
        jax.jit(jax.vmap(jax.grad(jax.checkpoint(partial(loss, function=f)), argnums=(0, 1))))(x, state)
        for f in (partial(selective_scan, **BLOCKS), reference)
    )
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("case", [case.small() for case in CASES], ids=lambda case: case.name)
def test_small_cases(case: Case, dtype: str) -> None:
    ours, definition = (partial(function, **case.keywords) for function in (selective_scan, reference))
    check(ours, definition, case.arrays(jax.random.key(0), dtype))


@pytest.mark.one_backend
def test_the_backward_pass_has_the_states_of_chunks_and_nothing_else_as_large() -> None:
    traced = selective_scan_forward.trace(*problem(64), None, block_t=16, block_c=12)
    states, backward = traced.gradient().backward
    (saved,) = states.ir.outputs
    assert np.prod(saved.ref.shape) == 2 * 4 * 12 * STATES
    assert len(backward.ir.outputs) == 9


@pytest.mark.one_backend
def test_no_tokens() -> None:
    *arrays, state = problem(0)
    out, last = selective_scan(*arrays, state)
    assert out.shape == arrays[0].shape
    np.testing.assert_array_equal(last, state)


@pytest.mark.one_backend
@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({0: jnp.zeros((2, 9, 12), jnp.int32)}, "x = int32[2, 9, 12]"),
        ({1: jnp.zeros((2, 9, 11))}, "dt = float32[2, 9, 11]"),
        ({2: jnp.zeros((5, 12))}, "a = float32[5, 12]"),
        ({2: jnp.zeros((12, 0))}, "a = float32[12, 0]"),
        ({3: jnp.zeros((2, 9, 4))}, "b = float32[2, 9, 4]"),
        ({4: jnp.zeros((2, 5, 9))}, "c = float32[2, 5, 9]"),
        ({5: jnp.zeros((12, 1))}, "d = float32[12, 1]"),
        ({6: jnp.zeros((2, 9))}, "z = float32[2, 9]"),
        ({7: jnp.zeros(11)}, "dt_bias = float32[11]"),
        ({8: jnp.zeros((2, 5, 12))}, "initial_state = float32[2, 5, 12]"),
        ({9: jnp.zeros((2, 9))}, "segment_ids = float32[2, 9]"),
    ],
)
def test_arrays_that_do_not_fit(change: dict[int, Any], got: str) -> None:
    *arrays, ids = [change.get(n, x) for n, x in enumerate([*problem(9), None])]
    with pytest.raises(ArgumentError, match=re.escape(got)) as caught:
        selective_scan(*arrays, segment_ids=ids)  # here
    assert "# here" in caught.value.loc.snippet()
