"""CUDA's mathematical functions in Triton's interpreter."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.lower.triton.sources import apply, assert_same
from tilekern.errors import InterpreterError
from tilekern.ir.elementwise import TABLE
from tilekern.ir.types import DTYPES, F32
from tilekern.lower.triton.interpreter.libdevice import SYMBOLS

pytestmark = pytest.mark.sweep(1)  # all cases: they take little time

pytest.importorskip("triton", reason="needs triton")

FUNCTIONS = {
    "acos": "acos", "acosh": "acosh", "asin": "asin", "asinh": "asinh", "atan": "atan", "atan2": "atan2",
    "atanh": "atanh", "cbrt": "cbrt", "cosh": "cosh", "erf": "erf", "erfc": "erfc", "erfinv": "erf_inv",
    "expm1": "expm1", "fmod": "rem", "lgamma": "lgamma", "log1p": "log1p", "log2": "log2", "nearbyint": "round_even",
    "nextafter": "nextafter", "pow": "pow", "rint": "round_even", "round": "round_away", "rsqrt": "rsqrt",
    "sinh": "sinh", "tan": "tan", "tanh": "tanh", "ceil": "ceil", "floor": "floor", "exp": "exp", "exp2": "exp2",
    "log": "log", "sin": "sin", "cos": "cos", "sqrt": "sqrt", "abs": "abs",
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_libdevice_have_the_meaning_of_the_language(name: str, dtype: str) -> None:
    row = TABLE[FUNCTIONS[name]]
    x, y = (np.random.default_rng(seed).standard_normal(64).astype(DTYPES[dtype]) * 2 for seed in range(2))
    with np.errstate(all="ignore"):
        expected = row.meaning(*(x, y)[: row.arity])
    assert_same(apply(f"libdevice.{name}({', '.join('xy'[: row.arity])})", x, y), expected)


@pytest.mark.parametrize(
    ("expression", "meaning"),
    [
        ("libdevice.trunc(x)", np.trunc),
        ("libdevice.copysign(x, -1.0 + 0 * x)", lambda x: -np.abs(x)),
        (
            "libdevice.popc(x.to(tl.int32)).to(tl.float32)",
            lambda x: np.bitwise_count(x.astype(np.int32).view(np.uint32)),
        ),
        ("libdevice.clz(x.to(tl.int64)).to(tl.float32)", lambda x: TABLE["clz"].meaning(x.astype(np.int64))),
        ("libdevice.isnan(x / (x - x)).to(tl.float32)", lambda x: x == 0),
    ],
)
def test_other_functions_of_libdevice(expression: str, meaning: Callable[[np.ndarray], np.ndarray]) -> None:
    x = np.arange(-32, 32).astype(F32)
    assert_same(apply(expression, x), meaning(x).astype(F32))


def test_an_unknown_function_of_libdevice_is_named() -> None:
    assert "__nv_j0f" not in SYMBOLS
    with pytest.raises(InterpreterError, match="does not have __nv_j0f of libdevice"):
        apply("libdevice.j0(x)", np.zeros(64, F32))


def test_functions_of_libdevice_choose_by_dtype() -> None:
    with pytest.raises(InterpreterError):
        apply("libdevice.tan(x)", np.zeros(64, DTYPES["bf16"]))
