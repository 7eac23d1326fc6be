"""Private and semi-public API of JAX, used here, in `_machine` and in `_meshes` alone.

Supported: jax 0.11.2 up to, not including, 0.13.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from types import CodeType, ModuleType, TracebackType
from typing import Any, cast

import jax
import jax.core
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax._src import config as _config
from jax._src import core as _core  # not by `jax.extend`, which imports Pallas
from jax._src import source_info_util
from jax._src import util as _util
from jax._src.core import Jaxpr, JaxprEqn, Literal, Primitive, Var, take_current_trace
from jax._src.interpreters import mlir as lowering
from jax._src.interpreters import partial_eval as _partial_eval
from jax.experimental import topologies
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager  # pyright: ignore[reportMissingTypeStubs] -- jaxlib has none for it
from jaxlib.mosaic.python import tpu  # pyright: ignore[reportMissingTypeStubs] -- jaxlib has none for it

from tilekern import _meshes, source
from tilekern._interception import own_functions

__all__ = ["Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var", "own_functions"]

for _module in (jax, jaxlib, np):
    source.register_internal(os.path.dirname(os.path.abspath(_module.__file__ or "")))
# JAX's own locations (lines in profiles, its error messages) should skip our frames too, but not the libraries'.
with os.scandir(os.path.dirname(os.path.abspath(__file__))) as _entries:
    for _entry in _entries:
        if _entry.name not in ("kernels", "nn"):
            source_info_util.register_exclusion(_entry.path + os.sep * _entry.is_dir())

Tracer = jax.core.Tracer
ShapedArray = jax.core.ShapedArray
UNOPTIMIZED = {"xla_backend_optimization_level": 0}  # compiler options of programs that run once


# --- tracing --------------------------------------------------------------------------------------------------------


def primitive(name: str, abstract_eval: Callable[..., Any], *, multiple_results: bool = False) -> Primitive:
    """A new primitive with the rule for the types of its results."""
    new = Primitive(name)
    new.multiple_results = multiple_results
    new.def_abstract_eval(abstract_eval)
    return new


def forget_parameters(primitive: Primitive) -> None:
    """Keep the parameters of a primitive of several results out of JAX's cache of types; only equations hold them."""

    def stage(trace: Any, source_info: Any, *operands: Any, **parameters: Any) -> Any:
        types, effects = cast(Any, primitive).abstract_eval(*(x.aval for x in operands), **parameters)
        eqn, results = trace.make_eqn(list(operands), types, primitive, parameters, effects, source_info=source_info)
        trace.frame.add_eqn(eqn)
        return results

    cast(Any, _partial_eval).custom_staging_rules[primitive] = stage


@dataclass(frozen=True)
class Settings:
    """The settings of JAX that a kernel's body obeys, with JAX's names and values; by default JAX's defaults.

    Attributes:
      x64: True if 64-bit types are on.
      dtype_promotion: "standard", or "strict", which refuses to promote implicitly.
      rank_promotion: "allow", "warn" or "raise".
      check_leaks: True if traced values that outlive their trace are errors.
    """

    x64: bool
    dtype_promotion: Any = "standard"
    rank_promotion: Any = "allow"
    check_leaks: bool = False


def settings() -> Settings:
    """`Settings` with the values that JAX has at the place of the call."""
    config = cast(Any, jax.config)
    x64 = bool(config.jax_enable_x64)
    promotion = config.jax_numpy_dtype_promotion, config.jax_numpy_rank_promotion
    return Settings(x64, *promotion, bool(config.jax_check_tracer_leaks))


@contextmanager
def checking(settings: Settings) -> Generator[None]:
    """A context that checks traced code by these settings: its promotions, and that it leaks no traced value.

    Code is traced with JAX's own functions, whatever a library has put in their place.
    """
    with (
        own_functions(),
        jax.numpy_dtype_promotion(settings.dtype_promotion),
        jax.numpy_rank_promotion(settings.rank_promotion),
        jax.check_tracer_leaks(settings.check_leaks),
    ):
        yield


@contextmanager
def tracing_under(settings: Settings) -> Generator[None]:
    """A context that traces a kernel's body under these settings; other settings of JAX have no influence."""
    with (
        jax.enable_x64(settings.x64),
        checking(settings),
        jax.default_matmul_precision(None),
        jax.disable_jit(False),
        _config.eager_constant_folding(False),  # jax.ensure_compile_time_eval, which would run primitives of ours
        _meshes.outside_of_meshes(),
    ):
        yield


def emits[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Decorator of a function that emits code: it runs under JAX's defaults, no user wants checks of our code."""

    @wraps(function)
    def run(*args: P.args, **keywords: P.kwargs) -> R:
        # A loop's values, kept after its end, are leaks in the eyes of jax.checking_leaks, but nobody uses them.
        with tracing_under(Settings(settings().x64)):
            return function(*args, **keywords)

    return run


def make_jaxpr(function: Callable[..., Any], *avals: jax.ShapeDtypeStruct) -> Jaxpr:
    """The jaxpr of `function`, with the arrays and tracers that it closes over in `consts`.

    It is traced with JAX's own functions, whatever a library has put in their place.
    """
    with own_functions():
        return jax.make_jaxpr(function)(*avals)


def of_jaxpr(jaxpr: Jaxpr, name: str) -> Callable[..., list[Any]]:
    """A jaxpr of `make_jaxpr` as a function of flat operands. NumPy arrays that the jaxpr closes over are copied."""
    constants = [snapshot(array) for array in jaxpr.consts]

    def run(*operands: Any) -> list[Any]:
        return cast(Any, jax.core).eval_jaxpr(cast(Any, jaxpr).jaxpr, constants, *operands)

    run.__name__ = name
    return run


def snapshot(array: Any) -> Any:
    """An array that nobody writes to: a copy of a NumPy array; an array of JAX itself."""
    return np.array(cast(Any, array)) if isinstance(array, np.ndarray) else array


def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], operands: Sequence[Any]) -> list[Any]:
    """The results of a jaxpr for `operands`, with `consts` in the place of its own constants."""
    return jax.core.eval_jaxpr(jaxpr.jaxpr, consts, *operands)


class Cache[K, V](dict[K, V]):
    """A dict of at most `size` entries: it starts anew when it is full, and when `jax.clear_caches` is called."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        cast(Any, _util).register_cache(self, "tilekern")

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride] -- JAX keeps caches as weak keys
        return id(self)

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self._size and key not in self:
            self.clear()
        super().__setitem__(key, value)

    def cache_clear(self) -> None:
        """Remove all entries. `jax.clear_caches` calls this name."""
        self.clear()


def equations(jaxpr: Jaxpr) -> Generator[JaxprEqn]:
    """The equations of a jaxpr in order, each followed by the equations of the jaxprs nested in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for nested in cast(Any, _core).jaxprs_in_params(eqn.params):
            yield from equations(nested)


def jvp_of(eqn: JaxprEqn) -> tuple[Jaxpr, list[int | None]]:
    """The rule of a call of a function of `jax.custom_jvp`.

    Returns:
      A jaxpr of the operands and the tangents of float operands, without the leading constants of the call; and for
      each result of the call, the number of its tangent among the results of the jaxpr, None if the tangent is zero.
    """
    params: Any = eqn.params
    avals = [cast(Any, v.aval) for v in eqn.invars[params["num_consts"] :]]
    is_float = [bool(jax.numpy.issubdtype(a.dtype, np.floating)) for a in avals]
    jaxpr, constants, is_zero = params["jvp_jaxpr_fun"].call_wrapped(*(not moves for moves in is_float))

    def rule(*operands: Any) -> list[Any]:
        return cast(Any, jax.core).eval_jaxpr(jaxpr, constants, *operands)

    moving = [a for a, moves in zip(avals, is_float, strict=True) if moves]
    rule_jaxpr = make_jaxpr(rule, *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*avals, *moving)))
    places = iter(range(len(is_zero), len(rule_jaxpr.jaxpr.outvars)))
    return rule_jaxpr, [None if zero else next(places) for zero in is_zero]


def split_scan(eqn: JaxprEqn) -> tuple[int, int]:
    """(number of constants, number of carries) of a `scan`; all later operands are sliced per iteration."""
    constants, carries, _ = eqn.params["ft_in"].update(eqn.invars).unpack()
    return len(list(constants)), len(list(carries))


def current_trace() -> Any:
    """The innermost running trace of JAX."""
    with cast(Any, take_current_trace)() as trace:
        return trace


def is_tracing() -> bool:
    """True under a trace, such as a trace of `jax.jit`, `jax.vmap` or `jax.grad`."""
    return not isinstance(current_trace(), cast(Any, _core).EvalTrace)


def is_live(value: Any) -> bool:
    """True if a value is known, or belongs to a trace that has not ended: the current one, or one around it."""
    if not isinstance(value, Tracer):
        return True
    trace = current_trace()
    while trace is not None and trace is not value._trace:  # pyright: ignore[reportPrivateUsage] -- the only way
        trace = getattr(trace, "parent_trace", None)
    return trace is not None


def is_array(value: object) -> bool:
    """True for an array of JAX or NumPy, concrete or traced, and for a number of NumPy."""
    has_type = hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "ndim")
    # NumPy's scalar types, and the module jax.numpy, have these attributes, too.
    return has_type and not isinstance(value, (type, ModuleType))


def array_of(value: Any) -> Any:
    """The array that an object stands for, such as a variable of Flax or Keras; any other value unchanged.

    Such an object has the method `__jax_array__`. Arrays in a tuple or a list are replaced, too.
    """
    if type(value) in (tuple, list):
        parts: list[Any] = list(map(array_of, value))
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
    if isinstance(value, jax.Array) or not hasattr(cast(type[Any], type(value)), "__jax_array__"):
        return value
    return jnp.asarray(value)


def has_symbols(tree: Any) -> bool:
    """True if a size of an array in a pytree is a symbol of `jax.export`, known only when the exported program runs."""
    return any(jax.export.is_symbolic_dim(n) for x in jax.tree.leaves(tree) for n in getattr(x, "shape", ()))


# --- locations ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _of_code(file: str, code: CodeType, lasti: int) -> source.Loc:
    """The place of an instruction; code objects that differ in their file alone are equal in Python."""
    return source.of_code(code, lasti)


def user_loc(eqn: JaxprEqn) -> source.Loc:
    """The user's line that an equation comes from."""
    traceback = cast(Any, eqn.source_info.traceback)
    if traceback is None:
        return source.UNKNOWN
    codes, lastis = cast(tuple[list[CodeType], list[int]], traceback.raw_frames())
    for code, lasti in zip(codes, lastis, strict=True):
        if not source.is_internal(code.co_filename):
            return _of_code(code.co_filename, code, lasti)
    return source.UNKNOWN


def loc_of_exception(traceback: TracebackType | None) -> source.Loc:
    """The user's line at which an exception was raised: the innermost of the user's frames."""
    loc = source.UNKNOWN
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not source.is_internal(code.co_filename):
            loc = _of_code(code.co_filename, code, traceback.tb_lasti)
        traceback = traceback.tb_next
    return loc


def written_in_jax(jaxpr: Jaxpr) -> bool:
    """True if a nested jaxpr is of a function of JAX. JAX caches it: its equations have the line of its first call."""
    info = getattr(jaxpr, "debug_info", None)
    _, _, place = str(getattr(info, "func_src_info", "")).partition(" at ")
    return not place or source.is_internal(place)


# --- lowering -------------------------------------------------------------------------------------------------------


def register_lowering(
    primitive: Primitive, function: Callable[..., Any], platform: str | None = None, kept_alive: str = ""
) -> None:
    """Lower a primitive, on `platform` or everywhere, by tracing `function(site, *operands, **parameters)`.

    The function is traced as on one device: its operands are the arrays of one device, whole or in a `jax.shard_map`.
    Only operands that explicit axes divide keep their types.

    Args:
      primitive: the primitive.
      function: emits the code of the primitive.
      platform: the platform; None for all platforms.
      kept_alive: the name of a parameter that lives as long as the lowered program.
    """

    def rule(context: Any, *operands: Any, **parameters: Any) -> Any:
        context = _meshes.with_devices(context)
        with _meshes.lowering_at(context) as site:
            lowered = cast(Any, mlir.lower_fun(partial(function, site), multiple_results=True))
            types = [x if site.explicit else ShapedArray(x.shape, x.dtype) for x in context.avals_in]
            results = lowered(context.replace(avals_in=types), *operands, **parameters)
        typed = zip(results, context.avals_out, strict=True)
        if kept_alive:
            context.module_context.add_keepalive(parameters[kept_alive])
        return [lowering.lower_with_sharding_in_types(context, x, aval) for x, aval in typed]

    mlir.register_lowering(primitive, rule, platform=platform)


def custom_call(
    name: str, target: str, results: Sequence[Any], *operands: Any, aliases: Mapping[int, int], **attributes: Any
) -> list[jax.Array]:
    """The results of native code: as `jax.ffi.ffi_call`, but HLO and profiles show `name`, and not "ffi_call".

    The code gets the attributes, except for `has_side_effect`: with it, XLA keeps a call whose results are not used.
    """
    types = tuple(ShapedArray(x.shape, x.dtype) for x in results)
    options = (tuple(aliases.items()), tuple(attributes.items()))
    return bind(_custom_call_p, *operands, name=name, target=target, types=types, options=options)


def _lower_custom_call(context: Any, *operands: Any, name: str, target: str, options: Any, **_: Any) -> Any:
    aliases, attributes = map(dict[Any, Any], options)
    effect = attributes.pop("has_side_effect", False)
    rule = cast(Any, jax.ffi.ffi_lowering)(target, operand_output_aliases=aliases, has_side_effect=effect)
    # JAX's location of an op is its kind, around its path in the program, around its place in the source.
    place = cast(Any, ir.Location.current).child_loc.child_loc
    path = "/".join([*filter(None, [str(context.name_stack)]), name])
    with ir.Location.name(f"{name}:", ir.Location.name(path, place)):
        return rule(context, *operands, **attributes)


_custom_call_p = primitive("tilekern_custom_call", lambda *_, **params: [*params["types"]], multiple_results=True)
mlir.register_lowering(_custom_call_p, _lower_custom_call)


@contextmanager
def abstract_tpu(device_kind: str, cores: int) -> Generator[None]:
    """Trace `pallas_call` for a TPU of a kind, which need not be here.

    Pallas asks the abstract mesh for the TPU while it traces and lowers a kernel. Every equation keeps the mesh that it
    was traced under, so the lowering may come later, outside of this. The mesh has no axes, so it may stand in any
    other mesh, such as the mesh of a `shard_map`.

    Args:
      device_kind: JAX's name of the TPU.
      cores: the number of cores of one device of JAX.
    """
    device = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=cores, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield


def tpu_topology(name: str) -> Any:
    """The first device of a topology that libtpu knows by name, "v5e:2x2", to compile for.

    Raises:
      RuntimeError: libtpu cannot be loaded, or is in use by another process.
    """
    return cast(Any, topologies).get_topology_desc(platform="tpu", topology_name=name).devices[0]


def mosaic_text(body: bytes) -> str:
    """The MLIR of a kernel, as people read it, from the bytes that a `tpu_custom_call` carries."""
    context = mlir.make_ir_context()
    tpu.register_dialect(context)
    context.allow_unregistered_dialects = True  # the bytes are in a stable form, with names of its own for operations
    with context:
        module = ir.Module.parse(body)
        PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
        return str(module)


_Rule = Callable[..., Any] | None


def register_rules(primitive: Primitive, *, jvp: _Rule = None, transpose: _Rule = None, batch: _Rule = None) -> None:
    """Attach differentiation and batching rules to a primitive."""
    if jvp is not None:
        ad.primitive_jvps[primitive] = jvp
    if transpose is not None:
        ad.primitive_transposes[primitive] = transpose
    if batch is not None:
        batching.primitive_batchers[primitive] = batch


def register_derivatives(primitive: Primitive, jvp: Callable[..., Any], transpose: Callable[..., Any]) -> None:
    """Attach rules for the derivatives of a primitive with several results; None stands for a tangent that is zero.

    Args:
      primitive: the primitive.
      jvp: (primals, tangents, **parameters) -> (results, their tangents).
      transpose: (cotangents, operands, **parameters) -> cotangents of the operands; an operand in which the
        results are linear is a `jax.ShapeDtypeStruct`, and only cotangents of such operands are used.
    """

    def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], **parameters: Any) -> Any:
        results, moved = jvp(primals, [None if _is_zero(t) else t for t in tangents], **parameters)
        avals = [jax.typeof(x) for x in primals]
        results, moved = ([_meshes.varying_like(x, avals) for x in values] for values in (results, moved))
        zeros = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in results]
        return results, [zero if t is None else t for t, zero in zip(moved, zeros, strict=True)]

    def transpose_rule(cotangents: Sequence[Any], *operands: Any, **parameters: Any) -> Any:
        linear = [ad.is_undefined_primal(x) for x in operands]
        arguments = [_meshes.whole_type(x.aval) if unknown else x for x, unknown in zip(operands, linear, strict=True)]
        operand_cotangents = transpose([None if _is_zero(c) else c for c in cotangents], arguments, **parameters)
        pairs = zip(operand_cotangents, operands, linear, strict=True)
        return [_meshes.varying_like(c, [x.aval]) if unknown else None for c, x, unknown in pairs]

    ad.primitive_jvps[primitive] = jvp_rule
    ad.primitive_transposes[primitive] = transpose_rule


def instantiated(tangent: Any) -> Any:
    """A tangent or cotangent as an array, also if it is zero."""
    return cast(Any, ad.instantiate_zeros(tangent))


def _is_zero(tangent: Any) -> bool:
    return isinstance(tangent, ad.Zero) or tangent.dtype == jax.dtypes.float0


def as_strong(value: Any) -> jax.Array:
    """An array without JAX's weak type, of the same dtype."""
    array = jnp.asarray(value)
    return jax.lax.convert_element_type(array, array.dtype)


def structure(tree: Any) -> Any:
    """`jax.tree.structure`, typed."""
    return cast(Any, jax.tree.structure(tree))


def flatten_with_path(tree: Any) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """`jax.tree_util.tree_flatten_with_path`, typed."""
    return cast(Any, jax.tree_util.tree_flatten_with_path(tree))


def jit_checked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`jax.jit` of a function that is one operation for JAX's checks for NaN and infinity.

    The checks name the function in their error. They run any other function again without jit, to find the operation at
    fault.
    """

    def run(*operands: Any) -> Any:
        return function(*operands)

    run.__name__ = run.__qualname__ = name
    cast(Any, run)._apply_primitive = True
    return jax.jit(run)


def bind(primitive: Primitive, *operands: Any, **parameters: Any) -> Any:
    """The result, or the list of results, of a primitive."""
    return cast(Any, primitive.bind(*operands, **parameters))


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """`jax.tree.flatten`, typed."""
    return cast(Any, jax.tree.flatten(tree))
