"""Tools for libraries of kernels."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.lang.checks import refused
from tilekern import authoring
from tilekern.errors import ArgumentError
from tilekern.kernels.matmul import matmul
from tilekern.kernels.rms_norm import rms_norm

LIBRARY = """
from tilekern.authoring import hide_frames, static_int
if {hidden}:
    hide_frames(__file__)

def half(n):
    return static_int(n, "n", 2) // 2
"""


def library(folder: Path, hidden: bool) -> Any:
    path = folder / f"library_{hidden}.py"
    path.write_text(LIBRARY.format(hidden=hidden))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_errors_of_a_hidden_file_name_its_caller(tmp_path: Path) -> None:
    hidden, shown = library(tmp_path, True), library(tmp_path, False)
    assert hidden.half(4) == 2
    with refused(ArgumentError, "n must be a static integer of at least 2", expected=">= 2", got="n = 1", fix="an int"):
        hidden.half(1)  # <-
    with pytest.raises(ArgumentError) as raised:
        shown.half(1)
    assert raised.value.loc.file == shown.__file__


def test_an_error_at_the_line_of_another() -> None:
    def user() -> None:
        raise ValueError  # the line

    try:
        user()
    except ValueError as error:
        with authoring.at_line_of(error):
            found = ArgumentError("no", expected="a", got="b", fix="c")
    assert found.loc.function == "user"


def test_arrays_and_traced_values() -> None:
    seen: list[tuple[bool, bool]] = []

    def look(x: Any) -> Any:
        seen.append((authoring.is_array(x), authoring.is_traced(x)))
        return x

    for x in (jnp.ones(2), np.ones(2), 3, np.float32):
        look(x)
    jax.jit(look)(1.0)
    assert seen == [(True, False), (True, False), (False, False), (False, False), (True, True)]


class Variable:
    """As a variable of Flax or Keras: no array itself, but JAX knows how to get one."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.dtype, self.shape, self.ndim = str(value.dtype), value.shape, value.ndim

    def __jax_array__(self) -> Any:
        return jnp.asarray(self.value)


def test_objects_that_stand_for_arrays() -> None:
    @authoring.takes_python_numbers
    def kinds(x: Any, *several: Any, eps: float, pair: Any) -> list[bool]:
        return [isinstance(x, jax.Array) for x in (x, *several, eps, *pair)]

    variable = Variable(np.ones(3, np.float32))
    assert kinds(variable, variable, 2, eps=variable, pair=[variable, None]) == [True, True, False, True, True, False]
    w = np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(matmul(Variable(np.ones((1, 3), np.float32)), Variable(w)), [[6, 9]])
    np.testing.assert_array_equal(jax.jit(lambda x: rms_norm(x, variable))(w.T), rms_norm(w.T))


def test_arrays_that_a_mesh_divides() -> None:
    mesh = jax.make_mesh((1,), ("a",), (jax.sharding.AxisType.Explicit,))
    assert not authoring.is_divided(jnp.ones(2)) and not authoring.is_divided(np.ones(2))
    with jax.set_mesh(mesh):  # one device has the whole array; tests/meshes/test_parts.py has more
        assert not authoring.is_divided(jax.device_put(jnp.ones(2), jax.P("a")))


def test_the_type_of_an_array_beside_another() -> None:
    found = authoring.type_beside(np.ones((2, 3), np.float32), jnp.ones(4))
    assert found == jax.ShapeDtypeStruct((2, 3), np.float32)


def test_a_function_that_is_not_elementwise() -> None:
    def rolled(x: Any) -> Any:
        return x + jnp.roll(x, 1, axis=1)  # <-

    jaxprs = [jax.make_jaxpr(rolled)(jax.ShapeDtypeStruct(s, jnp.float32)) for s in ((2, 3), (5, 7))]
    with pytest.raises(ArgumentError, match="a blur is not elementwise") as raised:
        authoring.check_elementwise("blur", jaxprs, "x")
    assert "depends on x of this element" in raised.value.expected
    assert "mixes the elements" in raised.value.got
    assert raised.value.loc.function == "rolled"
    assert "carry the array" in raised.value.fix


def test_one_call_tells_whether_a_function_is_elementwise() -> None:
    tile = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    authoring.check_elementwise("activation", [jax.make_jaxpr(jnp.tanh)(tile)])
    with pytest.raises(ArgumentError, match="a sum is not elementwise"):
        authoring.check_elementwise("a sum", [jax.make_jaxpr(lambda x: x - x.sum())(tile)])


def test_the_derivative_of_a_masked_function() -> None:
    x = jnp.array([-1.0, 0.0, 4.0])

    def f(x: Any) -> Any:
        return authoring.masked(x > 0, jnp.sqrt, x).sum()

    np.testing.assert_array_equal(jax.grad(f)(x), [0, 0, 0.25])
    np.testing.assert_array_equal(jax.grad(lambda x: jax.grad(f)(x).sum())(x), [0, 0, -1 / 32])
