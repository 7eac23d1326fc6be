"""An example of each error, which is run: the page of errors shows what it says."""

from __future__ import annotations

import inspect
import linecache
import re
import warnings
from textwrap import dedent

from tilekern import errors

FILE = "example.py"

PREAMBLE = """\
import jax
import jax.numpy as jnp

import tilekern as tk


def like(x, *_):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


x = jnp.ones((8, 4))
"""

# By class a program that raises it, behind the preamble.
EXAMPLES: dict[str, str] = {
    "ArgumentError": """
        @tk.kernel(out_type=like)
        def double(x, out, *, block: tk.Block = 4):
            i = tk.parallel(x.shape[0], block)
            out[i] = 2 * x[i]

        double(x, block=0)
    """,
    "TraceError": """
        @tk.kernel(out_type=like)
        def double(x, out):
            def step(k):
                i = tk.parallel(x.shape[0])
                out[i] = 2 * x[i]

            tk.foreach(tk.serial(2), step)

        double(x)
    """,
    "UnsupportedError": """
        @tk.kernel(out_type=like)
        def inverse(x, out):
            out[...] = jnp.linalg.pinv(x[...]).T

        inverse(x)
    """,
    "IndexingError": """
        @tk.kernel(out_type=like)
        def row(x, out):
            i = tk.parallel(x.shape[0], 4)
            out[i] = x[i, 2.5]

        row(x)
    """,
    "TileScopeError": """
        @tk.kernel(out_type=like)
        def last(x, out):
            tiles = []
            tk.foreach(tk.serial(x.shape[0], 4), lambda k: tiles.append(k))
            out[tiles[0]] = x[tiles[0]]

        last(x)
    """,
    "CarryError": """
        @tk.kernel(out_type=like)
        def sums(x, out):
            i = tk.parallel(x.shape[0], 4)
            total = tk.fold(tk.serial(x.shape[1]), lambda k, total: total + x[i], tk.zeros(i))
            out[i] = x[i] + total[:, None]

        sums(x)
    """,
    "ConcreteValueError": """
        @tk.kernel(out_type=like)
        def positive(x, out):
            i = tk.parallel(x.shape[0])
            if x[i, 0] > 0:
                out[i] = x[i]

        positive(x)
    """,
    "OutputError": """
        @tk.kernel(out_type=like)
        def add(x, out):
            out[...] += x[...]

        add(x)
    """,
    "TargetError": """
        @tk.kernel(out_type=like)
        def double(x, out):
            out[...] = 2 * x[...]

        double.trace(x).lower("cuda:sm_9")
    """,
    "ResourceError": """
        @tk.kernel(out_type=like)
        def double(x, out):
            out[...] = 2 * x[...]

        double.trace(jnp.ones((1 << 13, 1 << 13))).lower("tpu:v5e")
    """,
    "EstimateError": """
        @tk.kernel(out_type=like)
        def double(x, out):
            out[...] = 2 * x[...]

        double.trace(x).lower("cpu:xla").estimate()
    """,
    "NotDifferentiableError": """
        @tk.kernel(out_type=like, residuals=0)
        def power(x, out):
            out[...] = tk.fold(tk.serial(3), lambda k, y: jnp.sin(y), x[...])

        jax.grad(lambda x: power(x).sum())(x)
    """,
    "NotBatchableError": """
        @tk.kernel(out_type=like)
        def halves(x, out):
            @tk.when(x.shape[0] > 0)
            def _():
                out[...] = jax.vmap(lambda row: x[row])(jnp.arange(8))

        halves(x)
    """,
    "OutOfBoundsError": """
        from tilekern.ir.interpret import interpret
        from tilekern.ir.parse import parse

        func = parse('''
            func @scatter(%rows: ref<i32[6], in>, %out: ref<f32[8], zeros>) {
              grid %i in i[6 by 4]
              %v = load %rows[4*%i +: 4] : i32[4]
              %one = constant 1.0 : f32[4]
              store %one to %out[gather(%v, 4)]
            }''')
        interpret(func, jnp.arange(6))
    """,
    "UnwrittenError": """
        @tk.kernel(out_type=like)
        def small(x, out):
            out.store(..., x[...], mask=x[...] > 1)

        tk.interpret(small.trace(x))(x)
    """,
    "WriteConflictError": """
        @tk.kernel(out_type=like)
        def placed(x, places, out):
            i = tk.parallel(x.shape[0])
            out[places[i]] = x[i]

        places = jnp.arange(x.shape[0]) // 2
        tk.interpret(placed.trace(x, places))(x, places)
    """,
    "DeviceAssertionError": """
        @tk.kernel(out_type=like)
        def root(x, out):
            tk.device_assert((x[...] >= 0).all(), "a number is negative")
            out[...] = jnp.sqrt(x[...])

        tk.interpret(root.trace(x))(-x)
    """,
    "OrderDependenceError": """
        @tk.kernel(out_type=like)
        def running_sums(x, out):
            i = tk.parallel(x.shape[0])
            out[i] = x[i]
            out[i] = out[i] + out[i - 1]

        tk.interpret(running_sums.trace(x))(x)
    """,
    "VerifyError": """
        from tilekern.ir.elementwise import Elementwise
        from tilekern.ir.compute import splat
        from tilekern.ir.types import F32, I32, TileType

        one = splat(1, TileType((4,), I32)).result
        Elementwise(operands=(one, splat(1, TileType((4,), F32)).result), function="add")
    """,
    "PlanError": """
        from unittest import mock

        @tk.kernel(out_type=like)
        def shares(x, out):
            powers = jnp.exp(x[...])
            out[...] = powers / powers.sum(1, keepdims=True)

        without_places = mock.patch("tilekern.lower.llvm.emit_program.assign_offsets")
        with mock.patch.dict("os.environ", TILEKERN_DEBUG="verify"), without_places:
            shares.trace(x).lower("cpu:llvm")
    """,
    "ParseError": """
        from tilekern.ir.parse import parse

        parse("func @f(%x: ref<f31[4], in>) {}")
    """,
    "LoadError": """
        import pathlib
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "double.tile")
            path.write_text("tilekern kernel 99")
            tk.load(path)
    """,
    "DependencyError": """
        from unittest import mock

        @tk.kernel(out_type=like)
        def double(x, out):
            out[...] = 2 * x[...]

        with mock.patch.dict("sys.modules", triton=None):
            double.trace(x).lower("cuda:sm_90").compile()
    """,
    "SettingError": """
        import os
        from unittest import mock

        from tilekern.lower.llvm.compile import toolchain

        @tk.kernel(out_type=like)
        def double(x, out):
            out[...] = 2 * x[...]

        toolchain.host.cache_clear()  # as in a new process
        with mock.patch.dict(os.environ, TILEKERN_CPU="avx2"):
            double(x, target="cpu")
    """,
    "CompileError": """
        from unittest import mock

        @tk.kernel(out_type=like)
        def double(x, out):
            out[...] = 2 * x[...]

        with mock.patch("triton.compile", side_effect=RuntimeError("PassManager::run failed")):
            double.trace(x).lower("cuda:sm_90").compile()
    """,
    "FallbackWarning": """
        @tk.kernel(out_type=like)
        def double(x, out):
            out[...] = 2 * x[...]

        with jax.enable_x64(True):
            wide = jax.ShapeDtypeStruct((8, 128), jnp.float64)
            jax.jit(double).trace(wide).lower(lowering_platforms=("tpu",))
    """,
}


def run(name: str) -> Exception | None:
    """The error, or warning, of an example."""
    code = f"{PREAMBLE}\n\n{dedent(EXAMPLES[name]).strip()}\n"
    linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
    with warnings.catch_warnings(action="error", category=UserWarning):
        try:
            exec(compile(code, FILE, "exec"), {"__name__": "example"})
        except Exception as error:
            return error
    return None


def markdown() -> str:
    """The section of each class: its docstring, its example, and what that says."""
    return f"```python\n{PREAMBLE}```\n\n" + "\n".join(map(_section, EXAMPLES))


def _section(name: str) -> str:
    kind, error = getattr(errors, name), run(name)
    assert type(error) is kind, f"the example of {name} raises {error!r}"
    said = re.sub(r"(?<![\w.])/(?:[\w.-]+/)+", "", str(error))  # folders of this machine
    code = dedent(EXAMPLES[name]).strip()
    return f"## {name}\n\n{inspect.getdoc(kind)}\n\n```python\n{code}\n```\n\n```text\n{said}\n```\n"
