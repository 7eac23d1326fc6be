"""Wrong calls of every public function: each is refused with an error of ours, at the user's line, with a remedy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tilekern as tk
from tilekern.errors import ArgumentError, TilekernError

TYPE = jax.ShapeDtypeStruct((8, 16), jnp.float32)
INTEGERS = jax.ShapeDtypeStruct((8, 16), jnp.int32)
X = np.ones(TYPE.shape, np.float32)


class Anything:
    """An object of a class that nobody knows."""


@dataclass(frozen=True)
class Scope:
    """Names of a kernel's body."""

    x: tk.Ref
    out: tk.Ref
    total: tk.Ref
    i: tk.Tile
    tile: jax.Array


@dataclass(frozen=True)
class Call:
    """A right call; each of its arguments will be replaced by wrong ones.

    Attributes:
      function: the public function, by the names of a kernel's body.
      args, keywords: functions of the same that make the arguments.
      inside: the call is made in the body of a kernel.
    """

    function: Callable[[Scope], Callable[..., Any]]
    args: tuple[Callable[[Scope], Any], ...] = ()
    keywords: dict[str, Callable[[Scope], Any]] = field(default_factory=dict)
    inside: bool = True


@tk.kernel(out_type=lambda x: x)
def double(x, out):
    out[...] = 2 * x[...]


@tk.op(out_type=lambda x: x)
def twice(x):
    return double(double(x))


TABLE = tk.Tuned()
TRACED, LOWERED = double.trace(X), double.trace(X).lower("cpu:xla")
OP = twice.trace(X)
LOWERED_OP = OP.lower("cpu:xla")
COMPILED, COMPILED_OP = LOWERED.compile(), LOWERED_OP.compile()


def constant(value: Any) -> Callable[[Scope], Any]:
    return lambda _: value


def of(function: Any, *args: Any, inside: bool = True, **keywords: Any) -> Call:
    """A call of a function that needs no names, with arguments that are constants."""
    return Call(constant(function), tuple(map(constant, args)), {k: constant(v) for k, v in keywords.items()}, inside)


def update(method: str) -> Call:
    return Call(lambda s: getattr(s.total.at[0], method), (constant(1),), {"mask": constant(True)})


def declare(decorator: Any) -> Callable[..., Any]:
    """A decorator, and a function that it decorates."""

    def body(x: Any, out: Any) -> Any:
        return x

    return lambda *args, **keywords: decorator(*args, **keywords)(body)


def wrong_body(*_: Any) -> None:
    return None


FUNCTIONS: dict[str, Call] = {
    "accumulator": of(tk.accumulator, jnp.bfloat16, inside=False),
    "cdiv": of(tk.cdiv, 7, 2, inside=False),
    "debug_print": Call(constant(tk.debug_print), (constant("{}"), lambda s: s.tile)),
    "device": of(tk.device, "cpu", inside=False),
    "device_assert": Call(constant(tk.device_assert), (lambda s: (s.tile > 0).all(), constant("no"))),
    "dot": Call(constant(tk.dot), (lambda s: s.tile, lambda s: s.tile.T), {"precision": constant("ieee")}),
    "ds": of(tk.ds, 1, 2),
    "export.checks": of(tk.export.checks, inside=False),
    "fold": Call(constant(tk.fold), (lambda _: tk.serial(4), constant(lambda k, c: c + k), constant(0))),
    "foreach": Call(constant(tk.foreach), (lambda _: tk.serial(4), constant(lambda k: None))),
    "full": of(tk.full, (4,), 1.0, jnp.float32),
    "grid": Call(constant(tk.grid), (constant(1), constant(1))),
    "grouped": of(tk.grouped, 2),
    "hoist": of(tk.hoist, lambda: 1),
    "interpret": of(tk.interpret, TRACED, inside=False),
    "kernel": of(
        declare(tk.kernel), out_type=lambda x: x, donate=("x",), linear=("x",), residuals=1 << 20, inside=False
    ),
    "linear_scan": Call(
        constant(tk.linear_scan),
        (lambda s: s.tile, lambda s: s.tile),
        {"axis": constant(0), "reverse": constant(False)},
    ),
    "load": of(tk.load, "no file", inside=False),
    "op": of(declare(tk.op), out_type=lambda x: x, linear=("x",), inside=False),
    "parallel": of(tk.parallel, 1, 1, order="descending"),
    "patch": of(tk.patch, "softmax", strict=True, inside=False),
    "points": of(tk.points, 1, 2),
    "random_bits": of(tk.random_bits, jnp.zeros(2, jnp.uint32), 1, 2),
    "region": of(tk.region, "scores"),
    "serial": of(tk.serial, 16, 4, start=0, stop=16, reverse=False, whole_tiles=False),
    "stochastic_round": Call(
        constant(tk.stochastic_round), (lambda s: s.tile, constant(jnp.uint32(3)), constant(jnp.bfloat16))
    ),
    "tile": of(tk.tile, 8, 4, 1),
    "unpack": Call(constant(tk.unpack), (lambda s: s.tile.astype(jnp.int8), constant(0))),
    "when": of(tk.when, True),
    "zeros": of(tk.zeros, (4,), jnp.float32),
    "Sum": of(tk.Sum, TYPE, inside=False),
    "Zeros": of(tk.Zeros, TYPE, inside=False),
    "tuned": of(tk.tuned, "no file", inside=False),
    "Tuned": of(tk.Tuned, (), inside=False),
}
METHODS: dict[str, Call] = {
    "Kernel.__call__": of(double, X, inside=False),
    "Kernel.trace": of(double.trace, X, inside=False),
    "CustomOp.__call__": of(twice, X, inside=False),
    "CustomOp.trace": of(twice.trace, X, inside=False),
    "Traced.__call__": of(TRACED, X, inside=False),
    "Traced.interpret": of(TRACED.interpret, X, inside=False),
    "Traced.lower": of(TRACED.lower, "cpu:xla", inside=False),
    "Traced.gradient": of(TRACED.gradient, "x", inside=False),
    "Lowered.interpret": of(LOWERED.interpret, X, inside=False),
    "Compiled.__call__": of(COMPILED, X, inside=False),
    "TracedOp.lower": of(OP.lower, "cpu:xla", inside=False),
    "CompiledOp.__call__": of(COMPILED_OP, X, inside=False),
    "Tuned.merge": of(TABLE.merge, TABLE, inside=False),
    "Ref.__getitem__": Call(lambda s: s.x.__getitem__, (lambda s: s.i,)),
    "Ref.__setitem__": Call(lambda s: s.out.__setitem__, (lambda s: s.i, lambda s: s.tile)),
    "Ref.load": Call(lambda s: s.x.load, (lambda s: s.i,), {"mask": constant(True), "fill": constant(0.0)}),
    "Ref.store": Call(lambda s: s.out.store, (lambda s: s.i, lambda s: s.tile), {"mask": constant(True)}),
    "Ref.reshape": Call(lambda s: s.x.reshape, (constant(16), constant(8))),
    "Ref.transpose": Call(lambda s: s.x.transpose, (constant(1), constant(0))),
    "Ref.add": update("add"),
    "Ref.max": update("max"),
    "Ref.min": update("min"),
    "Ref.and_": update("and_"),
    "Ref.or_": update("or_"),
    "Ref.xor": update("xor"),
}

# --- kinds of wrong arguments -----------------------------------------------------------------------------------------


def tracer() -> Any:
    """A traced value of a function that has ended."""
    kept: list[Any] = []
    jax.make_jaxpr(lambda x: kept.append(x) or x)(1.0)
    return kept[0]


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a bool": lambda: True,
    "a string": lambda: "rows",
    "bytes": lambda: b"rows",
    "a negative number": lambda: -3,
    "a huge number": lambda: 2**70,
    "a float": lambda: 2.5,
    "NaN": lambda: float("nan"),
    "a complex number": lambda: 1j,
    "a list": lambda: ["a"],
    "a dict": lambda: {"a": 1},
    "a set": lambda: {1, 2},
    "a tuple": lambda: (1, (2, 3)),
    "a function": lambda: wrong_body,
    "a class": lambda: Anything,
    "an object": lambda: Anything(),
    "a generator": lambda: iter([1, 2]),
    "a slice": lambda: slice(0, 2, 2),
    "an ellipsis": lambda: ...,
    "a module": lambda: jnp,
    "a dtype": lambda: np.dtype("datetime64[s]"),
    "an array of another rank": lambda: np.ones((2, 3, 1, 1, 2), np.float32),
    "an array of another dtype": lambda: np.ones(TYPE.shape, np.int16),
    "a complex array": lambda: np.ones(TYPE.shape, np.complex64),
    "an object array": lambda: np.array([None, Anything()], object),
    "a string array": lambda: np.array(["a", "b"]),
    "a structured array": lambda: np.zeros(2, [("a", "i4")]),
    "a type of an array": lambda: TYPE,
    "a tracer": tracer,
    "a random key": lambda: jax.random.key(0),
}


type Change = Callable[[list[Any], dict[str, Any]], None]


def changes(call: Call) -> Iterator[tuple[str, str, Change]]:
    """Each wrong call: the place of the wrong argument, its kind, and what makes it wrong."""
    for number in range(len(call.args)):
        for kind, make in WRONG.items():
            yield str(number), kind, lambda args, _, n=number, make=make: args.__setitem__(n, make())
    for name in call.keywords:
        for kind, make in WRONG.items():
            yield name, kind, lambda _, keywords, name=name, make=make: keywords.__setitem__(name, make())
    yield "call", "too many", lambda args, _: args.extend([None] * 9)
    yield "call", "an unknown keyword", lambda _, keywords: keywords.__setitem__("nonsense", 1)
    if call.args:
        yield "call", "too few", lambda args, _: args.clear()


def run(call: Call, change: Change) -> None:
    """Make a call whose arguments are changed."""

    def make(scope: Any) -> None:
        args, keywords = [arg(scope) for arg in call.args], {k: arg(scope) for k, arg in call.keywords.items()}
        change(args, keywords)
        call.function(scope)(*args, **keywords)

    if not call.inside:
        return make(None)

    @tk.kernel(out_type=lambda x: (TYPE, tk.Zeros(INTEGERS)))
    def f(x, out, total):
        i = tk.parallel(8, 4)
        tile = x[i]
        make(Scope(x, out, total, i, tile))
        out[i] = tile

    f.trace(X)
    return None


# --- what is right after all ------------------------------------------------------------------------------------------

FLAGS, WHOLE = {"a bool"}, {"a negative number", "a huge number"}
REALS = {"a negative number", "a float", "NaN"}
VECTORS = {"an array of another dtype"}
ARRAYS = {"an array of another rank", *VECTORS}
ALL_ARRAYS = {kind for kind in WRONG if "array" in kind} | {"a tracer", "a random key"}
STORED = {*FLAGS, *WHOLE, *REALS}
MASK = {"None", *FLAGS}
# The body of a kernel decides about a None, and a container.
OF_BODY = {"None", "a dict"}
UPDATES = [name for name, call in METHODS.items() if call.keywords.keys() == {"mask"} and len(call.args) == 1]
CALLED = {*OF_BODY, *REALS, *ARRAYS}
TRACED_FOR = {"0": CALLED | {"a type of an array", "a tracer"}}

# By place the kinds of arguments that are no mistake, or that are passed to the user's own code.
RIGHT: dict[str, dict[str, set[str]]] = {
    "cdiv": dict.fromkeys("01", FLAGS | WHOLE | VECTORS),
    "debug_print": {"0": {"a string"}, "1": {*FLAGS, *REALS, *ARRAYS}},
    "device_assert": {"0": FLAGS, "1": {"a string"}},
    "dot": {"precision": {"None"}},
    "ds": {"0": WHOLE},
    "fold": {"2": {*OF_BODY, *REALS, *ARRAYS, "a tuple", "a random key"} - VECTORS},
    "foreach": {"1": {"a function"}},
    "full": {"1": STORED},
    "grid": {"call": {"too few"}},
    "hoist": {"0": {"a function"}},
    "kernel": {"out_type": {"a function", "a class"}, "residuals": {"a huge number"}},
    "linear_scan": {"reverse": FLAGS},
    "load": {"0": {"a string"}},  # there is no such file: an OSError
    "op": {"out_type": {"a function", "a class"}},
    "parallel": {"1": {"None"}, "order": {"None"}},
    "patch": {"strict": FLAGS, "call": {"too few"}},
    "points": dict.fromkeys("01", WHOLE | VECTORS),
    "random_bits": dict.fromkeys("12", {"a negative number"} | VECTORS),
    "region": {"0": {"a string"}},
    "serial": {"1": {"None"}, "start": WHOLE, "stop": WHOLE | {"None"}, "reverse": FLAGS, "whole_tiles": FLAGS},
    "stochastic_round": {"0": {"a float", "NaN", "an array of another rank"}},
    "tile": {"2": WHOLE},
    "unpack": {"1": FLAGS},
    "when": {"0": FLAGS},
    "Sum": {"0": ALL_ARRAYS},
    "Zeros": {"0": ALL_ARRAYS},
    "Tuned": {"call": {"too few"}},
    "Tuned.merge": {"call": {"too few"}},
    "Kernel.__call__": {"0": CALLED},
    "Kernel.trace": TRACED_FOR,
    "CustomOp.__call__": {"0": CALLED},
    "CustomOp.trace": TRACED_FOR,
    "Traced.lower": {"call": {"too few"}},
    "TracedOp.lower": {"call": {"too few"}},
    "Traced.gradient": {"0": {"None"}, "call": {"too few"}},
    "Ref.__getitem__": {"0": {"a negative number", "an ellipsis"} | VECTORS},
    "Ref.__setitem__": {"1": STORED},
    "Ref.load": {"0": {"a negative number", "an ellipsis"} | VECTORS, "mask": MASK, "fill": STORED | {"None"}},
    "Ref.store": {"1": STORED, "mask": MASK},
    "Ref.transpose": {"0": FLAGS, "call": {"too few"}},
    **{name: {"0": FLAGS | {"a negative number"}, "mask": MASK} for name in UPDATES},
}


# --- the test ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # JAX's, of what it will refuse
@pytest.mark.parametrize("name", {**FUNCTIONS, **METHODS})
def test_wrong_calls_are_refused(name: str) -> None:
    call, right = {**FUNCTIONS, **METHODS}[name], RIGHT.get(name, {})
    for place, kind, change in changes(call):
        where, refused = f"{name} of {kind} as {place}", None
        try:
            run(call, change)
        except TilekernError as error:
            refused = error
        except Exception:
            assert kind in right.get(place, ()), f"{where}: an error that is not ours"
            continue
        assert (refused is None) == (kind in right.get(place, ())), f"{where}: {refused}"
        if refused is not None:
            assert refused.loc.file == __file__, f"{where}: {refused}"
            assert refused.expected and refused.got and refused.fix, f"{where}: {refused}"


@pytest.mark.parametrize("name", {**FUNCTIONS, **METHODS})
def test_the_calls_of_the_table_are_right(name: str) -> None:
    if name not in ("load", "tuned"):  # there is no such file
        run({**FUNCTIONS, **METHODS}[name], lambda args, keywords: None)


# Classes whose objects the package makes.
MADE = {"Compiled", "CompiledOp", "Cost", "CustomOp", "Device", "Kernel", "Lowered", "LoweredOp", "Ref", "Resources"}
MADE |= {"ShardingRule", "Tile", "Traced", "TracedOp", "Block", "Choice"}


def test_the_table_has_every_public_function() -> None:
    names = {name for name in tk.__all__ if callable(getattr(tk, name))} - MADE
    own = inspect.getmembers(tk.export, lambda f: getattr(f, "__module__", "") == tk.export.__name__)
    assert names | {f"export.{name}" for name, _ in own} == FUNCTIONS.keys()


def test_the_table_has_every_method_of_a_ref() -> None:
    names = {name for name, _ in inspect.getmembers(tk.Ref, inspect.isfunction) if not name.startswith(("_", "tree_"))}
    assert {f"Ref.{name}" for name in names - {"no_value"}} < METHODS.keys()


def test_an_error_of_the_users_own_code_stays() -> None:
    @tk.kernel(out_type=lambda x: x)
    def f(x, out):
        out[...] = tk.fold(tk.serial(4), lambda k, carry: carry + None, x[...])

    with pytest.raises(TypeError, match="None") as caught:
        f(X)
    assert not isinstance(caught.value, TilekernError)


def test_the_form_of_a_refusal() -> None:
    with pytest.raises(ArgumentError) as caught:
        tk.cdiv(None, b=2)
    assert str(caught.value).startswith(
        "tk.cdiv does not take these arguments: unsupported operand type(s) for +: 'NoneType' and 'int'\n"
        "  expected: tk.cdiv(a, b)\n"
        "  got: (None, b=2)\n"
        "  fix: see help(tk.cdiv): Quotient a / b rounded up, for a >= 0 and b > 0. Both are ints or traced integers.\n"
    )
    assert isinstance(caught.value.__cause__, TypeError)
