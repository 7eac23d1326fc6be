"""Helpers of these tests: run a kernel compiled and interpreted, and check errors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import CodeType, TracebackType
from typing import Any

import jax
import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import tilekern as tk
from tests.ir.funcs import assert_same
from tilekern.errors import TilekernError
from tilekern.ir.core import Func
from tilekern.kernel.body import Body
from tilekern.kernel.definition import Options
from tilekern.kernel.traced import kernel_call
from tilekern.lower.target import DEFAULT

CPUS = ("cpu:xla", "cpu:llvm") if find_spec("llvmlite") else ("cpu:xla",)
EXTENTS = st.sampled_from([0, 1, 7, 8, 9, 13])  # nothing, one, primes, a block and its neighbours
BLOCKS = st.sampled_from([1, 3, 4, 8])
# Every example is traced, interpreted, and compiled by LLVM and by XLA, which takes most of the time.
COMPILED = settings(max_examples=12)
WIDE = settings(max_examples=60)  # interpreted only


def kernel(*outputs: Any) -> Callable[[Callable[..., None]], tk.Kernel]:
    """Decorator for a kernel with outputs of these types: (shape, dtype), or None for the type of the first input."""

    def out_type(*inputs: Any) -> Any:
        types = tuple(jax.ShapeDtypeStruct(*((inputs[0].shape, inputs[0].dtype) if o is None else o)) for o in outputs)
        return types if len(types) > 1 else types[0]

    return tk.kernel(out_type=out_type)


def like_first(function: Callable[..., None]) -> tk.Kernel:
    """Decorator for a kernel whose only output has the type of the first input."""
    return kernel(None)(function)


def both(function: tk.Kernel, *arrays: Any, **keywords: Any) -> list[np.ndarray]:
    """Run a kernel compiled, by each backend of CPUs, and interpreted; the outputs must be equal bit for bit."""
    interpreted = jax.tree.leaves(tk.interpret(function.trace(*arrays, **keywords))(*arrays))
    compiled = list[np.ndarray]()
    for target in CPUS:
        compiled = [np.asarray(x) for x in jax.tree.leaves(function(*arrays, **keywords, target=target))]
        for got, expected in zip(compiled, interpreted, strict=True):
            assert_same(got, expected, zeros=False)
    return compiled


def interpreted(function: tk.Kernel, *arrays: Any, **keywords: Any) -> list[np.ndarray]:
    """Run a kernel in the interpreter."""
    return jax.tree.leaves(tk.interpret(function.trace(*arrays, **keywords))(*arrays))


def check(function: tk.Kernel, *arrays: Any, oracle: Any, run: Callable[..., Any] = both, **keywords: Any) -> None:
    """Compare outputs bit for bit with `oracle`: arrays, or a function that computes them from the same arguments."""
    expected = jax.tree.leaves(oracle(*arrays, **keywords) if callable(oracle) else oracle)
    found = run(function, *arrays, **keywords)
    for got, wanted in zip(found, expected, strict=True):
        assert_same(got, np.asarray(wanted), zeros=False)


def numbers(*shape: int, start: int = 1) -> np.ndarray:
    """Distinct small integers as float32: their sums are exact in any order."""
    return np.arange(start, start + int(np.prod(shape)), dtype=np.float32).reshape(shape)


class refused:
    """Expect an error `kind`, with these parts in its text, at the caller's line marked `# <-`."""

    def __init__(self, kind: type[TilekernError], summary: str, *, expected: str = "", got: str = "", fix: str = ""):
        self.kind, self.parts = kind, {"summary": summary, "expected": expected, "got": got, "fix": fix}

    def __enter__(self) -> None:
        self.code = sys._getframe(1).f_code

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> bool:
        assert error is not None, f"nothing was raised; expected {self.kind.__name__}"
        if type(error) is not self.kind:
            return False
        for name, part in self.parts.items():
            assert part in getattr(error, name), f"{name}: {part!r} is not in {getattr(error, name)!r}"
        for name in ("expected", "got", "fix"):
            assert getattr(error, name), f"the error does not say {name}"
        line = marked_line(self.code)
        assert (error.loc.file, error.loc.line) == (self.code.co_filename, line), f"{error.loc}, not line {line}"
        assert f"at {self.code.co_filename}:{line} in " in str(error)
        return True


def marked_line(code: CodeType) -> int:
    """Line of a function with the comment `# <-`."""
    lines, first = inspect.getsourcelines(code)
    (line,) = [first + n for n, text in enumerate(lines) if "# <-" in text]
    return line


def before_passes(kernel: tk.Kernel, *arrays: Any) -> Func:
    """The Func of a kernel as its body was traced, before all passes."""
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return Body(kernel_call(kernel._definition, types, Options({}, {}, None), DEFAULT)).first.tracing.func
