"""Uses of the language outside of a kernel, and nested traces."""

from __future__ import annotations

import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import check, like_first, numbers
from tilekern.errors import TraceError
from tilekern.lang import state

X = numbers(6)


def test_a_trace_ends_with_its_block() -> None:
    outer, inner = state.TraceState("outer"), state.TraceState("inner")
    with state.tracing(outer):
        with state.tracing(inner):
            assert state.current("this") is inner
        assert not inner.scope.open
        assert state.current("this") is outer
        assert outer.scope.open
    with pytest.raises(TraceError, match="this is used outside a kernel"):
        state.current("this")


def test_a_kernel_traced_while_another_is_traced() -> None:
    """A nested trace has its own axes and stores."""
    lengths: list[int] = []

    @like_first
    def inner(x, out):
        i = tk.parallel(6, 2)
        out[i] = x[i]

    @like_first
    def outer(x, out):
        i = tk.parallel(6, 4)
        lengths.append(len(inner.trace(X).ir.axes))
        j = tk.parallel(1)
        out[i + j] = x[i + j] * 2

    check(outer, X, oracle=X * 2)
    assert set(lengths) == {1}
    assert len(outer.trace(X).ir.axes) == 2
    np.testing.assert_array_equal(inner(X), X)
