"""`TILEKERN_INTERPRET=1`: calls run in the interpreter, with its checks, also inside of JAX' transformations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tilekern as tk
from tilekern.errors import SettingError


def like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERN_INTERPRET", "1")


def test_calls_run_in_the_interpreter() -> None:
    @tk.kernel(out_type=like)
    def cube(x, out):
        i = tk.parallel(x.shape[0], 4)
        out[i] = x[i] * x[i] * x[i]

    x = jnp.arange(10.0)
    assert (cube(x) == x**3).all() and (jax.jit(jax.vmap(cube))(jnp.stack([x, -x])) == jnp.stack([x**3, -(x**3)])).all()
    assert (jax.grad(lambda x: cube(x).sum())(x) == 3 * x**2).all()
    assert "callback" in jax.jit(cube).lower(x).as_text()


def test_faults_that_a_compiled_program_hides_are_found() -> None:
    @tk.kernel(out_type=like)
    def half_written(x, out):
        out.store(..., x[...], mask=x[...] < 4)

    with pytest.raises(Exception, match=r"out\[4\] is never stored"):
        jax.block_until_ready(half_written(jnp.arange(10.0)))


def test_prints_come_in_the_order_of_programs(capsys: pytest.CaptureFixture[str]) -> None:
    @tk.kernel(out_type=like)
    def talking(x, out):
        i = tk.parallel(x.shape[0], 4)
        tk.debug_print("tile {}", i.index)
        out[i] = x[i]

    jax.block_until_ready(talking(jnp.arange(10.0)))
    assert capsys.readouterr().out.startswith("tile 0\ntile 1\ntile 2\n")


def test_0_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERN_INTERPRET", "0")

    @tk.kernel(out_type=like)
    def double(x, out):
        out[...] = x[...] * 2

    assert "pure_callback" not in jax.jit(double).lower(jnp.arange(3)).as_text()


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEKERN_INTERPRET", "yes")

    @tk.kernel(out_type=like)
    def double(x, out):
        out[...] = x[...] * 2

    with pytest.raises(SettingError, match="TILEKERN_INTERPRET is neither 0 nor 1") as error:
        double(jnp.arange(3))
    assert "got: TILEKERN_INTERPRET=yes" in str(error.value)
