"""Importer from jaxpr to block IR: memory and control flow. Pure primitives are in `rules`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax, source
from tilekern._jax import Jaxpr, JaxprEqn
from tilekern.errors import ConcreteValueError, TileScopeError, TraceError, UnsupportedError
from tilekern.ir.compute import Constant, splat
from tilekern.ir.control import Fold, Hoist, Switch, While
from tilekern.ir.core import Axis, Block, Value, index_value
from tilekern.ir.debug import Assert, Print
from tilekern.ir.memory import Access, Atomic, Dim, Load, Position, Store
from tilekern.ir.types import FOUR_BITS, INDEX, RefType, TileType, is_dtype
from tilekern.lang import custom, four_bits, rules
from tilekern.lang.compositions import COMPOSED, composition
from tilekern.lang.emitter import Emitter, type_of
from tilekern.lang.primitives import (
    HOIST,
    assert_p,
    atomic_p,
    fold_index_p,
    load_p,
    print_p,
    program_index_p,
    store_p,
)
from tilekern.lang.reduction import reduction
from tilekern.lang.regions import regions_of
from tilekern.lang.rules_dynamic import element, with_element
from tilekern.lang.tiles import describe, way_out

# Limit in bytes: a captured array up to this size becomes a constant of the IR, a larger one an operand of the kernel.
CONSTANT_BYTES = 4096

# Remedies, in errors, for the unsupported primitives that users try most.
_WAYS_OUT = {
    **dict.fromkeys(
        ("debug_print", "debug_callback"),
        'use tk.debug_print("{}", values), or store the values to an output of their own',
    ),
    **dict.fromkeys(("pure_callback", "io_callback"), "compute it outside the kernel and pass the result in"),
    **dict.fromkeys(
        (*(f"random_{name}" for name in ("seed", "bits", "wrap", "unwrap", "split", "fold_in")), "threefry2x32"),
        "use tk.random_bits(key_data, coordinates), or draw the numbers outside the kernel and pass them in",
    ),
    "tilekern_call": "call one kernel after the other in jitted code",
    "pallas_call": "call one kernel after the other in jitted code",
}


class Importer(Emitter):
    """Appends the ops of one jaxpr.

    Attributes:
      captured: (array, param) for each array that the body closes over and that is an operand.
      within: the call of the function whose derivative rule is imported; None outside of rules.
    """

    def __init__(self, grid: tuple[Value, ...]) -> None:
        super().__init__()
        self._grid = grid
        self._env: dict[Any, Value] = {}
        self._loc_is_fixed = False
        self._path = ""  # of the equation that is imported: the regions around it, also in outer jaxprs
        self.captured: list[tuple[Any, Value]] = []
        self.within: custom.Call | None = None

    def run(self, jaxpr: Jaxpr, operands: Sequence[Value]) -> tuple[Value, ...]:
        """Append the ops of `jaxpr` applied to `operands`, and return its results."""
        inner: Any = jaxpr.jaxpr
        for var, array in zip(inner.constvars, jaxpr.consts, strict=True):
            with source.at(_first_use(inner, var)):
                self._env[var] = self._constant(array)
        self._env.update(zip(inner.invars, operands, strict=True))
        for eqn in inner.eqns:
            self._import(eqn)
        return tuple(self._read(v) for v in inner.outvars)

    def _read(self, atom: Any) -> Value:
        if not isinstance(atom, _jax.Literal):
            return self._env[atom]
        literal: Any = atom
        return self._constant(np.asarray(literal.val, literal.aval.dtype))

    def _import(self, eqn: JaxprEqn) -> None:
        outer, path = self.loc, self._path
        if not self._loc_is_fixed:
            self._path = "/".join(filter(None, (path, regions_of(eqn))))
            self.loc = self._loc_of(eqn)
        with source.at(self.loc):
            operands = [self._read(atom) for atom in eqn.invars]
            special = _SPECIAL.get(eqn.primitive.name)
            results = special(self, eqn, operands) if special else self._pure(eqn, operands)
        self._env.update(zip(eqn.outvars, results, strict=True))
        self.loc, self._path = outer, path

    def _loc_of(self, eqn: JaxprEqn) -> source.Loc:
        loc: source.Loc = eqn.params.get("loc") or _jax.user_loc(eqn)
        return replace(loc, region=self._path) if self._path and loc is not source.UNKNOWN else loc

    def _pure(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        for value, atom in zip(operands, eqn.invars, strict=True):
            if isinstance(value.type, RefType):
                raise _stale_ref(f"{eqn.primitive.name} of {atom}")
        four_bits.check_allowed(eqn)
        results = rules.apply(self, eqn, operands)
        if results is None:
            raise _unsupported(eqn)
        return results

    def _constant(self, array: Any) -> Value:
        """Import a captured array: as a constant if it is known and small, else as a further operand, loaded whole."""
        if array.dtype in FOUR_BITS and not isinstance(array, _jax.Tracer):
            array = np.asarray(array).astype(FOUR_BITS[array.dtype])
        if jnp.issubdtype(array.dtype, jax.dtypes.extended) or not is_dtype(np.dtype(array.dtype)):
            raise UnsupportedError(
                "an array of this dtype cannot be used in a kernel",
                expected="float, integer or bool arrays",
                got=f"dtype = {array.dtype}",
                fix=way_out(array.dtype),
            )
        if not _jax.is_live(array):
            raise escaped()
        if _jax.has_symbols(array):
            raise unknown_size(describe(array))
        tile = TileType(tuple(array.shape), np.dtype(array.dtype))
        if not isinstance(array, _jax.Tracer) and tile.nbytes <= CONSTANT_BYTES:
            numbers = np.asarray(array)
            if numbers.size and numbers.tobytes() == numbers.flat[:1].tobytes() * numbers.size:
                return self.one(splat(numbers.flat[0], tile, loc=self.loc))
            return self.one(Constant(array=_jax.snapshot(numbers), shape=tile.shape, loc=self.loc))
        for earlier, earlier_param in self.captured:
            if earlier is array:
                return self._load_whole(earlier_param)
        param = Value(RefType(tile.shape, tile.dtype, "in"), f"captured{len(self.captured)}")
        self.captured.append((cast(Any, array), param))
        return self._load_whole(param)

    def _load_whole(self, param: Value) -> Value:
        dims = tuple(Dim("block", Position(), n) for n in param.ref.shape)
        return self.one(Load(operands=(param,), access=Access(dims), loc=self.loc))

    # --- memory ---

    def _load(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        _check_ref(operands[0])
        if eqn.params["dtype"] in FOUR_BITS:
            return [four_bits.load(self, eqn, operands)]
        masked, filled = eqn.params["masked"], eqn.params["filled"]
        access = eqn.params["access"]
        return self.add(Load(operands=tuple(operands), access=access, masked=masked, filled=filled, loc=self.loc))

    def _store(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        _check_ref(operands[0])
        access, masked = eqn.params["access"], eqn.params["masked"]
        dtype = np.dtype(cast(Any, eqn.invars[1].aval).dtype)
        if dtype in FOUR_BITS:
            four_bits.store(self, eqn, operands, dtype)
            return ()
        return self.add(Store(operands=tuple(operands), access=access, masked=masked, loc=self.loc))

    def _atomic(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        _check_ref(operands[0])
        four_bits.check_allowed(eqn)
        access, masked, kind = eqn.params["access"], eqn.params["masked"], eqn.params["kind"]
        return self.add(Atomic(operands=tuple(operands), access=access, masked=masked, kind=kind, loc=self.loc))

    def _print(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        return self.add(Print(operands=tuple(operands), format=eqn.params["format"], loc=self.loc))

    def _assert(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        return self.add(Assert(operands=tuple(operands), message=eqn.params["message"], loc=self.loc))

    def _program_index(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        axis: int = eqn.params["axis"]
        return [self._grid[axis]]

    # --- nested jaxprs ---

    def _inline(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        jaxpr: Any = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr") or eqn.params.get("fun_jaxpr")
        if eqn.params.get("name") == HOIST:
            region = self.block((), partial(self.run, jaxpr, operands))
            return self.add(Hoist(operands=(self.splat(0, INDEX),), regions=(region,), loc=self.loc))
        in_jax = _jax.written_in_jax(jaxpr)
        quotient = rules.floor_divide(self, eqn, operands) if in_jax else None
        if quotient is not None:
            return [quotient]
        fixed, self._loc_is_fixed = self._loc_is_fixed, self._loc_is_fixed or in_jax
        results = self.run(jaxpr, operands)
        self._loc_is_fixed = fixed
        return results

    def _custom(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        """Import a function that has a derivative of its own."""
        if self.within is not None and self.within.is_it(eqn, operands):
            return [self.within.result]
        results = self._inline(eqn, [custom.stopped(self, v) for v in operands])
        return custom.marked(self, eqn, operands, results, self._of_rule if self.within is None else None)

    def _of_rule(self) -> Importer:
        """Make the importer of a derivative rule, whose ops are at the line of the call."""
        importer = Importer(())
        importer.loc, importer._loc_is_fixed = self.loc, True
        return importer

    def _reduce(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        """Import `lax.reduce`, whose combiner may be any function."""
        return self._function(reduction(eqn), operands)

    def _composed(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        """Import a primitive that JAX computes by other ones, such as `jnp.searchsorted`."""
        return self._function(composition(eqn), operands)

    def _barrier(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        """Import `lax.optimization_barrier`, the identity."""
        return operands

    def _platform(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        """Import the choice of `lax.platform_dependent`: its default, which is right everywhere, for all targets."""
        platforms: Sequence[Any] = eqn.params["platforms"]
        if None not in platforms:
            raise UnsupportedError(
                "a kernel is one program for all platforms",
                expected="lax.platform_dependent with a default",
                got=f"branches for {', '.join(name for names in platforms for name in names)} alone",
                fix="give it a default=, which is taken",
            )
        return [self.splat(platforms.index(None), INDEX)]

    def _function(self, function: Callable[..., Any], operands: list[Value]) -> Sequence[Value]:
        """Import a function of JAX, applied to `operands`, at the line of the equation that it stands for."""
        types = [jax.ShapeDtypeStruct(v.tile.shape, v.tile.dtype) for v in operands]
        fixed, self._loc_is_fixed = self._loc_is_fixed, True
        results = self.run(_jax.make_jaxpr(function, *types), operands)
        self._loc_is_fixed = fixed
        return results

    def _cond(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        index, *arguments = operands
        branches: Sequence[Jaxpr] = eqn.params["branches"]
        regions = tuple(self.block((), partial(self.run, branch, arguments)) for branch in branches)
        return self.add(Switch(operands=(self.convert(index, INDEX.dtype),), regions=regions, loc=self.loc))

    def _while(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        body: Jaxpr = eqn.params["body_jaxpr"]
        skip, constants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        shared, inits = operands[skip : skip + constants], operands[skip + constants :]
        for inner in body.eqns:
            if inner.primitive is fold_index_p:
                return self._fold(eqn, inner, shared, inits)
        regions = (self._region(eqn.params["cond_jaxpr"], operands[:skip], inits), self._region(body, shared, inits))
        return self.add(While(operands=tuple(inits), regions=regions, loc=self.loc))

    def _region(self, jaxpr: Jaxpr, shared: list[Value], inits: list[Value]) -> Block:
        """Import the jaxpr of a loop as a block whose arguments are the carries."""

        def body(*args: Value) -> tuple[Value, ...]:
            return self.run(jaxpr, [*shared, *args])

        return self.block(tuple(Value(v.type) for v in inits), body)

    def _fold(self, eqn: JaxprEqn, marker: JaxprEqn, shared: list[Value], inits: list[Value]) -> Sequence[Value]:
        """Import a `while` made by `lang.loops.fold`: its counter is the tile index; the marker holds its bounds."""
        body: Any = eqn.params["body_jaxpr"].jaxpr
        outer_values = dict(zip(body.invars, shared, strict=False))
        bounds = [outer_values[a] if not isinstance(a, _jax.Literal) else self._read(a) for a in marker.invars[1:]]
        axis: Axis = marker.params["axis"]
        # JAX removes carries that the body returns unchanged, and adds the tangents of differentiated carries.
        hint: str = marker.params["hint"] if len(inits) == 2 else ""
        args = (index_value(axis.name), *(Value(v.type, hint) for v in inits[1:]))

        def region(index: Value, *carries: Value) -> tuple[Value, ...]:
            self._env[marker.outvars[0]] = index
            return self.run(eqn.params["body_jaxpr"], [*shared, index, *carries])[1:]

        results = self.add(
            Fold(
                operands=(*bounds, *inits[1:]),
                regions=(self.block(args, region),),
                axis=axis,
                reverse=marker.params["reverse"],
                loc=marker.params["loc"],
            )
        )
        return [inits[0], *results]  # the counter is not read after the loop

    def _fold_index(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        return [self._env[eqn.outvars[0]]]

    def _scan(self, eqn: JaxprEqn, operands: list[Value]) -> Sequence[Value]:
        constants, carries = _jax.split_scan(eqn)
        shared, inits = operands[:constants], operands[constants : constants + carries]
        inputs, axis = operands[constants + carries :], Axis("step", eqn.params["length"])
        stacked = [type_of(v) for v in eqn.outvars[carries:]]
        carried = [*inits, *(self.splat(0, tile) for tile in stacked)]
        if axis.extent == 0 and (inputs or stacked):  # no element of an empty array can be sliced
            return carried

        def step(index: Value, *values: Value) -> tuple[Value, ...]:
            results = self.run(
                eqn.params["jaxpr"], [*shared, *values[:carries], *(element(self, x, index) for x in inputs)]
            )
            outputs = zip(values[carries:], results[carries:], strict=True)
            return (*results[:carries], *(with_element(self, whole, part, index) for whole, part in outputs))

        body = self.block((index_value("step"), *(Value(v.type) for v in carried)), step)
        bounds = [self.splat(n, INDEX) for n in (0, axis.extent)]
        return self.add(
            Fold(operands=(*bounds, *carried), regions=(body,), axis=axis, reverse=eqn.params["reverse"], loc=self.loc)
        )


_SPECIAL: dict[str, Callable[[Importer, JaxprEqn, list[Value]], Sequence[Value]]] = {
    load_p.name: Importer._load,  # pyright: ignore[reportPrivateUsage] -- the class's own table
    store_p.name: Importer._store,  # pyright: ignore[reportPrivateUsage]
    atomic_p.name: Importer._atomic,  # pyright: ignore[reportPrivateUsage]
    print_p.name: Importer._print,  # pyright: ignore[reportPrivateUsage]
    assert_p.name: Importer._assert,  # pyright: ignore[reportPrivateUsage]
    program_index_p.name: Importer._program_index,  # pyright: ignore[reportPrivateUsage]
    fold_index_p.name: Importer._fold_index,  # pyright: ignore[reportPrivateUsage]
    "reduce": Importer._reduce,  # pyright: ignore[reportPrivateUsage]
    "optimization_barrier": Importer._barrier,  # pyright: ignore[reportPrivateUsage]
    "platform_index": Importer._platform,  # pyright: ignore[reportPrivateUsage]
    **dict.fromkeys(COMPOSED, Importer._composed),  # pyright: ignore[reportPrivateUsage]
    "while": Importer._while,  # pyright: ignore[reportPrivateUsage]
    "scan": Importer._scan,  # pyright: ignore[reportPrivateUsage]
    "cond": Importer._cond,  # pyright: ignore[reportPrivateUsage]
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint"),
        Importer._inline,  # pyright: ignore[reportPrivateUsage]
    ),
    **dict.fromkeys(
        ("custom_jvp_call", "custom_vjp_call"),
        Importer._custom,  # pyright: ignore[reportPrivateUsage]
    ),
}


def _first_use(inner: Any, var: Any) -> source.Loc:
    """User's line of the first equation that uses `var`."""
    return next((_jax.user_loc(eqn) for eqn in inner.eqns if any(a is var for a in eqn.invars)), source.UNKNOWN)


def escaped() -> TileScopeError:
    """Make the error for a traced value or a ref that is used after its loop or trace has ended."""
    return TileScopeError(
        "a traced value is used outside the loop, the function or the trace that made it",
        expected="values and refs of the body that is being traced",
        got="one of a body that has ended, kept in a variable, or in a function that JAX had traced before",
        fix="return values from loop bodies as carries; pass refs as arguments; define functions in the body",
    )


def unknown_size(got: str) -> ConcreteValueError:
    """Make the error for a captured array whose size is a symbol of `jax.export`."""
    return ConcreteValueError(
        "a kernel closes over an array whose size is not known",
        expected="arrays of sizes that are known when the kernel is traced",
        got=got,
        fix="take jax.vmap over a dim of any size, if its elements do not mix; or export for each size",
    )


def _check_ref(value: Value) -> None:
    if not isinstance(value.type, RefType):
        raise _stale_ref("a load or store")


def _stale_ref(use: str) -> TraceError:
    return TraceError(
        "a function kept a ref of another trace",
        expected="refs that reach the function as arguments, or through the enclosing function of this trace",
        got=f"{use} through a function that JAX had traced before, with the refs of that time",
        fix="pass the ref as an argument, or define the function inside the kernel's body",
    )


def _unsupported(eqn: JaxprEqn) -> UnsupportedError:
    name = eqn.primitive.name
    operand_types = ", ".join(str(v.aval) for v in eqn.invars)
    return UnsupportedError(
        f"`{name}` is not part of the language",
        expected="elementwise operations, reductions, dots, shape operations, casts, loops and conditionals over tiles",
        got=f"{name}({operand_types})",
        fix=_WAYS_OUT.get(name, "compute it outside the kernel, or write it with the operations above"),
    )
