"""Meshes: the types of calls inside of a mesh, and programs that XLA divides. With `_jax`, the user of private API.

Inside of `jax.shard_map`, the type of an array says over which manual axes of the mesh it varies; `jax.grad` depends on
this. A type also names the explicit axes that divide the array. Automatic axes are XLA's: no type names them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.core
from jax._src import config, core, sharding_impls
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy  # pyright: ignore[reportMissingTypeStubs] -- jaxlib has none for it

ShapedArray = jax.core.ShapedArray


# --- types ----------------------------------------------------------------------------------------------------------


@contextmanager
def outside_of_meshes() -> Generator[None]:
    """A context to trace as on one device: the types of arrays do not mention the mesh around the call."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    local = AbstractMesh((), (), abstract_device=device)
    with jax.sharding.use_abstract_mesh(local), config._check_vma(False):  # pyright: ignore[reportPrivateUsage] -- the only way
        yield


def result_types(name: str, operands: Sequence[ShapedArray], results: Sequence[Any]) -> list[ShapedArray]:
    """The types of results of given shapes and dtypes, in the mesh that is set, or else in the operands' mesh.

    Results vary over the manual axes over which the operands vary, and explicit axes do not divide results.
    """
    varying = core.ManualAxisType(varying=core.standard_vma_rule(name, *operands))
    meshes = [jax.sharding.get_abstract_mesh(), *(x.sharding.mesh for x in operands)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), meshes[0])
    whole = NamedSharding(mesh, PartitionSpec())
    return [ShapedArray(x.shape, x.dtype, sharding=whole, manual_axis_type=varying) for x in results]


def is_divided(aval: ShapedArray) -> bool:
    """True if each device holds a part or an addend only, by its type: explicit axes, or "unreduced"."""
    return any(aval.sharding.mesh.shape.get(axis, 2) > 1 for axis in _named(aval))


def _named(aval: Any) -> list[str]:
    """The mesh axes in a type, without the axes over which it varies."""
    spec = aval.sharding.spec
    of_dims: list[str] = [
        axis for axes in spec.partitions for axis in ([axes] if isinstance(axes, str) else axes or ())
    ]
    return [*of_dims, *spec.unreduced, *spec.reduced, *aval.mat.unreduced]


def inside_mesh_of(avals: Sequence[ShapedArray]) -> Any:
    """A context: trace in the mesh of the types of operands that explicit axes divide."""
    return jax.sharding.use_abstract_mesh(next(aval.sharding.mesh for aval in avals if is_divided(aval)))


def types_of(function: Callable[..., Sequence[Any]], avals: Sequence[ShapedArray]) -> list[ShapedArray]:
    """The types of a function's results, by JAX's rules for operands that explicit axes divide."""
    with inside_mesh_of(avals):
        return [jax.typeof(x) for x in jax.eval_shape(function, *map(whole_type, avals))]


def spec_of(aval: ShapedArray) -> tuple[tuple[str, ...], ...]:
    """For each dim of a type, the explicit axes that divide it."""
    return spec_of_sharding(aval.sharding, aval.ndim)


def spec_of_sharding(sharding: NamedSharding, ndim: int) -> tuple[tuple[str, ...], ...]:
    """For each dim of an array, the axes of the mesh that divide it."""
    dims = [*sharding.spec.partitions, *[None] * (ndim - len(sharding.spec))]
    return tuple((d,) if isinstance(d, str) else tuple(d or ()) for d in dims)


def spec_in_hlo(sharding: Any, mesh: Any, ndim: int) -> tuple[tuple[str, ...], ...] | None:
    """For each dim of an array, the axes of the mesh that divide it, by a sharding that XLA found.

    None if a part of an axis divides a dim: a part has no name.
    """
    try:
        (spec,) = sharding_impls.parse_flatten_op_sharding(sharding._hlo_sharding, mesh)
    except (ValueError, NotImplementedError, StopIteration, KeyError, AssertionError):  # JAX raises each of them
        return None
    return spec_of_sharding(NamedSharding(mesh, spec), ndim)


def replicated_like(sharding: Any) -> Any:
    """The sharding of arrays that are whole on each of the devices of another sharding."""
    return sharding_impls.GSPMDSharding.get_replicated(sharding._device_assignment)


def is_addend(aval: ShapedArray) -> bool:
    """True if a reduction of an array over devices is still to come, or made, by its type."""
    spec = aval.sharding.spec
    return bool(spec.unreduced or spec.reduced or aval.mat.unreduced)


def explicit_axes(mesh: Any) -> frozenset[str]:
    """The names of the explicit axes of a mesh, without axes that divide the batch of a `jax.vmap` around."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    mapped = cast(Any, core).get_axis_env().explicit_mesh_axis_names
    return frozenset(name for name, kind in kinds if kind == AxisType.Explicit) - mapped


def alike(operands: Sequence[Any]) -> Sequence[Any]:
    """Operands of one call, cast to vary over the same manual axes: each axis over which any operand varies."""
    return cast(Any, core).auto_insert_reshard(*map(_plain, operands))


def _plain(operand: Any) -> Any:
    """An operand whose type says nothing about reductions to come, and names no explicit axis of a single device."""
    aval = jax.typeof(operand)
    if aval.mat.reduced:
        return _varying(operand, aval.mat.reduced)
    if _named(aval) and not is_divided(aval):
        return cast(Any, jax).reshard(operand, PartitionSpec())
    return operand


def _varying(value: Any, axes: frozenset[str]) -> Any:
    return cast(Any, jax.lax).pcast(value, tuple(axes), to="varying")


def type_beside(shaped: Any, value: Any) -> jax.ShapeDtypeStruct:
    """The type of an array with the shape and dtype of `shaped` that varies over the manual axes of `value`."""
    return typed(shaped, jax.typeof(value))


def typed(shaped: Any, like: ShapedArray) -> jax.ShapeDtypeStruct:
    """The type of an array with the shape and dtype of `shaped` that varies over the manual axes of the type `like`."""
    if like.mat.empty:
        return jax.ShapeDtypeStruct(shaped.shape, shaped.dtype)
    whole = NamedSharding(like.sharding.mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(shaped.shape, shaped.dtype, sharding=whole, manual_axis_type=like.mat)


def whole_type(aval: ShapedArray) -> jax.ShapeDtypeStruct:
    """A type with its whole description of a mesh: division by explicit axes, and variation over manual axes."""
    if is_divided(aval):
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=aval.sharding, manual_axis_type=aval.mat)
    return typed(aval, aval)


def placed(values: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """The values, divided by explicit axes as in `types`."""
    pairs = zip(values, map(jax.typeof, types), strict=True)
    return [cast(Any, jax).reshard(x, t.sharding) if jax.typeof(x).sharding != t.sharding else x for x, t in pairs]


def varying_like(value: Any, avals: Sequence[Any], without: Sequence[str] = ()) -> Any:
    """The value, cast to vary over the manual axes over which `avals` vary, but for some; None stays None."""
    if value is None:
        return None
    axes = frozenset[str]().union(*(aval.mat.varying for aval in avals)) - frozenset(without)
    missing = axes - jax.typeof(value).mat.varying
    return _varying(value, missing) if missing else value


# --- programs for several devices ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """The program that a call is lowered in.

    Attributes:
      exporting: True for `jax.export`, to run in another process.
      divided: the devices or axes among which XLA divides the program, in words; "" for a program of one device, and in
        a `jax.shard_map` over all axes of the mesh.
      gathered: the most bytes of operands that XLA gathers on each device for a call that it does not divide.
      has_devices: True if the devices are known, so that XLA may ask for the program of a device's part.
      explicit: True if explicit axes divide operands.
    """

    exporting: bool
    divided: str
    gathered: int
    has_devices: bool = False
    explicit: bool = False


def register_lowering_inside(primitive: Any, function: Any) -> None:
    """Lower a primitive of several results by tracing a function inside of the `jax.shard_map` around it."""
    mlir.register_lowering(primitive, cast(Any, mlir).lower_fun(function, multiple_results=True))


def with_devices(context: Any) -> Any:
    """A lowering context with devices, which `custom_partitioning` needs, and JAX gives for certain primitives alone.

    Only the places of the devices in the mesh matter, so any devices of this process will do.
    """
    module = context.module_context
    axes = module.axis_context
    if not isinstance(axes, sharding_impls.ShardingContext) or axes.num_devices == 1 or axes.device_assignment:
        return context
    devices = _devices(module.platforms[0], axes.num_devices)
    mesh = axes.abstract_mesh or _mesh_in(module.module)
    if devices is None or mesh is None or mesh.size != axes.num_devices:
        return context
    sharded = sharding_impls.ShardingContext(axes.num_devices, devices, mesh)
    return context.replace(module_context=module.replace(axis_context=sharded))


def _mesh_in(module: Any) -> AbstractMesh | None:
    """The mesh by whose axes a program divides its arguments, or values in it; None if no sharding names a mesh."""
    for sharding in _shardings_in(module):
        mesh = sdy.TensorShardingAttr(sharding).mesh_or_ref
        if sdy.MeshAttr.isinstance(mesh):
            axes = [sdy.MeshAxisAttr(axis) for axis in sdy.MeshAttr(mesh).axes]
            if axes:
                return AbstractMesh(tuple(axis.size for axis in axes), tuple(axis.name for axis in axes))
    return None


def _shardings_in(module: Any) -> list[Any]:
    shardings = [ir.DictAttr(a)["sdy.sharding"] for a in _arguments_of(module) if "sdy.sharding" in ir.DictAttr(a)]

    def visit(operation: Any) -> Any:
        if operation.name in _ASKS:
            shardings.append(operation.attributes["sharding"])
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return shardings


def _arguments_of(module: Any) -> Any:
    """The attributes of the arguments of a program's main function."""
    functions = [f for f in module.body.operations if "sym_name" in f.attributes]
    main = next(f for f in functions if ir.StringAttr(f.attributes["sym_name"]).value == "main")
    return ir.ArrayAttr(main.attributes["arg_attrs"])


def _devices(platform: str, count: int) -> tuple[Any, ...] | None:
    """`count` devices, of `platform` if it has as many here; None if no platform has as many."""
    for name in (platform, None):
        try:
            devices = cast(list[Any], jax.devices(name))
        except RuntimeError:  # no such platform here
            continue
        if len(devices) >= count:
            return tuple(devices[:count])
    return None


# Operations that ask for a sharding.
_ASKS = ("sdy.sharding_constraint", "sdy.reshard")

# True while a call is lowered whose operands are whole on each device. Then operands of calls inside are whole, too.
_whole: ContextVar[bool] = ContextVar("_whole", default=False)


@contextmanager
def lowering_at(context: Any) -> Generator[Site]:
    """The site of a lowering context of JAX. Code inside is traced as on one device, unless it is `explicit`."""
    module, avals = context.module_context, context.avals_in
    if any(map(is_divided, avals)):
        with inside_mesh_of(avals):
            yield Site(bool(module.lowering_parameters.for_export), "", 0, explicit=True)
        return
    divided = _divided_among(module.axis_context)
    whole = not divided or _whole.get() or _is_whole(module.module, avals)
    gathered = 0 if whole else sum(aval.size * aval.dtype.itemsize for aval in avals)
    token = _whole.set(whole)
    try:
        with outside_of_meshes():
            exporting = bool(module.lowering_parameters.for_export)
            yield Site(exporting, divided, gathered, _has_devices(module.axis_context))
    finally:
        _whole.reset(token)


def _has_devices(axes: Any) -> bool:
    if isinstance(axes, sharding_impls.ShardingContext):
        return axes.device_assignment is not None
    return isinstance(axes, sharding_impls.SPMDAxisContext) and not isinstance(cast(Any, axes.mesh), AbstractMesh)


def _divided_among(axes: Any) -> str:
    """The devices, or axes of a mesh that no `shard_map` around the call handles, in words; "" if there are none."""
    if isinstance(axes, sharding_impls.ShardingContext):
        return f"{axes.num_devices} devices" if axes.num_devices != 1 else ""
    if not isinstance(axes, sharding_impls.SPMDAxisContext) or not axes.manual_axes:
        return ""
    manual = {*axes.manual_axes, *axes.mesh.manual_axes}
    not_manual = {a: n for a, n in axes.mesh.shape.items() if a not in manual}
    return f"the mesh's {', '.join(f'{a!r} of {n}' for a, n in not_manual.items())}" if not_manual else ""


def _is_whole(module: Any, avals: Sequence[Any]) -> bool:
    """True if the operands of a call in a program for several devices are proved to be whole on each device.

    The types prove it if no axis of the mesh is automatic. Otherwise, operands are whole if all arguments of the
    program are whole and no op inside asks for another sharding.
    """
    meshes = [aval.sharding.mesh for aval in avals]
    if all(not mesh.empty and AxisType.Auto not in mesh.axis_types for mesh in meshes):
        return True
    return all(map(_says_whole, _arguments_of(module))) and not _asks_for_shardings(module)


def _says_whole(argument: Any) -> bool:
    """True if the attributes of an argument say that no mesh axis divides it."""
    attributes = ir.DictAttr(argument)
    if "sdy.sharding" not in attributes:
        return "mhlo.sharding" not in attributes
    dims = sdy.TensorShardingAttr(attributes["sdy.sharding"]).dimension_shardings
    return not any(sdy.DimensionShardingAttr(dim).axes for dim in dims)


def _asks_for_shardings(module: Any) -> bool:
    requests: list[str] = []

    def visit(operation: Any) -> Any:
        requests.extend(["here"] * (operation.name in _ASKS))
        return ir.WalkResult.INTERRUPT if requests else ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return bool(requests)
