"""Traced kernels in files: a header, then the block IR as text.

    tilekern kernel, version 1, sha256 90bf…
    {"name": "double", "arguments": …, "results": …, "targets": …}

    func @double(%x: ref<f32[8], in>, %out: ref<f32[8], out>) {
      …

The first line has the version of the format, and a hash of all that follows. The header is JSON, and ends at an empty
line. There is one Func for each choice of blocks; each target names its Func and its launch options. `decode` trusts
nothing: the verifier checks each Func, and its arrays must have the types that the header tells callers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from tilekern.errors import ArgumentError, LoadError, NotDifferentiableError, ParseError, TargetError, TilekernError
from tilekern.ir.core import Array, Func
from tilekern.ir.parse import parse
from tilekern.ir.text import to_text
from tilekern.ir.types import DTYPES, FOUR_BITS, dtype_name, packed_type
from tilekern.kernel import derived_rules
from tilekern.kernel.instance import UNDIVIDED, Derivatives, Instance, Version
from tilekern.kernel.interface import Interface
from tilekern.kernel.results import Results
from tilekern.kernel.signature import LAUNCH, Signature
from tilekern.lang.tiles import describe
from tilekern.lower.target import TARGETS, Target, resolve

VERSION = 2
"""The version of the format. A change that older versions of tilekern cannot read takes the next number.

Version 2 adds the names of regions behind lines of the user. A kernel without regions is saved as version 1.
"""

_FIRST_LINE = re.compile(r"tilekern kernel, version (\d{1,9}), sha256 ([0-9a-f]{64})\n", re.ASCII)
_TYPE = re.compile(r"(\w+)\[((?:\d{1,18}(?:, )?)*)\]", re.ASCII)
_DTYPES = {**DTYPES, **{str(dtype): dtype for dtype in FOUR_BITS}}


# --- writing ---------------------------------------------------------------------------------------------------------


def encode(kernel: Instance, interface: Interface, default: Target, targets: Sequence[str] | None) -> str:
    """The text of a file with the kernel for `default` and `targets`; None for all targets that have a schedule."""
    members: dict[str, dict[str, Any]] = {}
    saved: dict[str, dict[str, Any]] = {}
    has_regions = False
    chosen = TARGETS.values() if targets is None else [resolve(name) for name in targets]
    for target in dict.fromkeys((default, *chosen)):
        try:
            version, launch = kernel.version(target), kernel.launch(target)
        except TilekernError:
            if targets is not None or target == default:
                raise
            continue  # the schedule has no blocks for it
        text = to_text(version.func, locations=True)
        has_regions = has_regions or any(op.loc.region for op in version.func.walk())
        constants = [_array_text(x) for x in version.constants]
        members.setdefault(text, {"reads": list(version.reads), "constants": constants})
        saved[target.full_name] = {"member": list(members).index(text), "launch": dict(launch)}
    header = {
        **_header(interface),
        "asked": None if kernel.asked is None else kernel.asked.asked_as,
        "default": default.full_name,
        "residuals": None if kernel.derivatives.are_stated else kernel.derivatives.residuals,
        "members": list(members.values()),
        "targets": saved,
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in header.items())
    content = f"{{{lines}}}\n\n" + "\n".join(members)
    return f"tilekern kernel, version {VERSION if has_regions else 1}, sha256 {_hash(content)}\n{content}"


def _header(interface: Interface) -> dict[str, Any]:
    name = interface.name
    return {
        "name": name,
        "arrays": list(interface.signature.arrays),
        "arguments": [_tree_text(name, tree) for tree in interface.arguments],
        "results": [_tree_text(name, tree) for tree in interface.results.trees],
        "single": interface.results.single,
        "statics": dict(interface.statics),
        "captured": [_array_text(array) for array in interface.captured],
    }


def _tree_text(name: str, tree: Any) -> Any:
    """A pytree of types as JSON: a dict as an object, a tuple as [...], a list as ["list", ...], a type as "f32[8]"."""
    if tree is None:
        return None
    if isinstance(tree, jax.ShapeDtypeStruct):
        return f"{dtype_name(tree.dtype)}{list(tree.shape)}"
    kind = cast(Any, type(tree))
    if kind is dict and all(isinstance(key, str) for key in tree):
        return {key: _tree_text(name, value) for key, value in tree.items()}
    if kind in (tuple, list):
        nodes = [_tree_text(name, value) for value in tree]
        return nodes if kind is tuple else ["list", *nodes]
    raise ArgumentError(
        f"{name} cannot be saved with these arguments or results",
        expected="arrays in tuples, lists and dicts with keys that are strings",
        got=describe(tree),
        fix="trace a kernel that takes a tuple or a dict in its place",
    )


def _array_text(array: Any) -> list[str]:
    contiguous = np.asarray(array)
    return [f"{dtype_name(contiguous.dtype)}{list(contiguous.shape)}", base64.b64encode(contiguous.tobytes()).decode()]


def _hash(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


# --- reading ---------------------------------------------------------------------------------------------------------


def decode(text: str, file: str) -> tuple[Instance, Interface, Target]:
    """The kernel in the text of a file, its interface, and the target that it was traced for.

    `file` is the name of the file, for errors.

    Raises:
      LoadError: the text is not of a saved kernel, was changed, or has a newer version.
      ParseError: a Func in it breaks a rule of the block IR.
    """
    head, _, body = _checked(text, file).partition("\n\n")
    try:
        header = json.loads(head)
        funcs = [parse(f"func {func_text}") for func_text in f"\n{body}".split("\nfunc ")[1:]]
        return _kernel(header, funcs)
    except ParseError:
        raise
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise _unreadable(file, f"a header that does not fit: {type(error).__name__}: {error}") from error


def _checked(text: str, file: str) -> str:
    """The text after the first line, which must name this version or an older one, and the hash of that text."""
    first = _FIRST_LINE.match(text)
    if first is None:
        raise _unreadable(file, f"a file that begins with {describe(text[:20])}")
    version, content = int(first[1]), text[first.end() :]
    if version > VERSION:
        raise LoadError(
            f"{file} was saved by a newer version of tilekern",
            expected=f"version {VERSION} of the format, or an older one",
            got=f"version = {version}",
            fix="upgrade tilekern, or save the kernel again with this version",
        )
    if _hash(content) != first[2]:
        raise _unreadable(file, "a text that was changed after it was saved: its hash is another one")
    return content


def _unreadable(file: str, got: str) -> LoadError:
    return LoadError(
        f"{file} is not the file of a saved kernel",
        expected="a file as kernel.trace(...).save(path) writes it",
        got=got,
        fix="save the kernel again",
    )


def _kernel(header: Mapping[str, Any], funcs: Sequence[Func]) -> tuple[Instance, Interface, Target]:
    name = str(header["name"])
    arguments, results = (tuple(map(_tree, header[key])) for key in ("arguments", "results"))
    signature = Signature(name, tuple(map(str, header["arrays"])), {}, {}, {})
    captured = tuple(map(_array, header["captured"]))
    statics = {str(key): str(value) for key, value in header["statics"].items()}
    interface = Interface(name, signature, arguments, Results(results, (), header["single"] is True), captured, statics)
    types = [*jax.tree.leaves(arguments), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in captured)]
    outputs = jax.tree.leaves(results)
    versions = [_version(entry, func, types, outputs) for entry, func in zip(header["members"], funcs, strict=True)]
    by_target = {t: (versions[int(saved["member"])], _launch(saved)) for t, saved in header["targets"].items()}
    asked = None if header["asked"] is None else resolve(header["asked"])
    default = resolve(header["default"])
    residuals = None if header["residuals"] is None else int(header["residuals"])
    return instance(name, asked, default, types, outputs, by_target, residuals), interface, default


def instance(
    name: str,
    asked: Target | None,
    target: Target,
    types: Sequence[jax.ShapeDtypeStruct],
    outputs: Sequence[jax.ShapeDtypeStruct],
    saved: Mapping[str, tuple[Version, Mapping[str, int]]],
    residuals: int | None,
) -> Instance:
    """A kernel without its Python source.

    Args:
      name: the name of the kernel.
      asked: the target that a call names; None for the best target of the platform.
      target: a target that it was saved for.
      types: the types of the operands.
      outputs: the types of the results.
      saved: the version and the launch options, by the full name of a target.
      residuals: the most bytes of carries that a backward pass may save; None if the author stated rules for
        derivatives, which are Python functions, so that the kernel has none.
    """

    def entry(target: Target) -> tuple[Version, Mapping[str, int]]:
        if target.full_name in saved:
            return saved[target.full_name]
        raise TargetError(
            f"the file of {name} has no blocks for this target",
            expected=f"one of {', '.join(map(repr, saved))}",
            got=f"target = {target.full_name!r}",
            fix=f"save the kernel with targets=[..., {target.full_name!r}]",
        )

    return Instance(
        name=name,
        asked=asked,
        target=target,
        outputs=outputs,
        divisible=UNDIVIDED,
        types_of_operands=lambda: types,
        version=lambda target: entry(target)[0],
        launch=lambda target: entry(target)[1],
        derivatives=Derivatives(_without_rules, _without_rules, 0, are_stated=True)
        if residuals is None
        else Derivatives(derived_rules.jvp, derived_rules.transpose, residuals),
    )


def _without_rules(kernel: Instance, *_: Any) -> Any:
    raise NotDifferentiableError(
        f"{kernel.name} was loaded from a file, without the rules for its derivatives",
        expected="a call that is not differentiated, or a kernel that was saved without rules of its own",
        got=f"a derivative of {kernel.name}",
        fix="differentiate the kernel itself; or save its backward kernel, too, and wrap both in jax.custom_vjp",
    )


def _version(entry: Mapping[str, Any], func: Func, types: Sequence[Any], outputs: Sequence[Any]) -> Version:
    """A version whose arrays are checked against the header; else compiled code would leave the arrays of a call."""
    constants = tuple(map(_array, entry["constants"]))
    version = Version(func, tuple(map(int, entry["reads"])), constants)
    if not all(0 <= number < len(types) + len(constants) for number in version.reads):
        raise ValueError(f"reads = {version.reads}")
    pairs = (("inputs", version.inputs(types), func.inputs), ("outputs", outputs, func.outputs))
    for side, avals, params in pairs:
        param_types = [(p.ref.shape, p.ref.dtype) for p in params]
        header_types = [packed_type(tuple(t.shape), np.dtype(t.dtype)) for t in avals]
        if param_types != header_types:
            raise ValueError(f"{side} of @{func.name} = {', '.join(str(p.ref) for p in params)}")
    return version


def _launch(entry: Mapping[str, Any]) -> dict[str, int]:
    launch = {str(name): int(value) for name, value in entry["launch"].items()}
    if not set(launch) <= set(LAUNCH) or min(launch.values(), default=1) < 1:
        raise ValueError(f"launch = {launch}")
    return launch


def _tree(node: Any) -> Any:
    if isinstance(node, str):
        return _type(node)
    if isinstance(node, list):
        nodes = cast("list[Any]", node)
        return list(map(_tree, nodes[1:])) if nodes[:1] == ["list"] else tuple(map(_tree, nodes))
    return None if node is None else {key: _tree(value) for key, value in node.items()}


def _type(text: str) -> jax.ShapeDtypeStruct:
    match = _TYPE.fullmatch(text)
    if match is None:
        raise ValueError(f"no type of an array: {text!r}")
    return jax.ShapeDtypeStruct(tuple(int(n) for n in match[2].split(", ") if n), _DTYPES[match[1]])


def _array(entry: Any) -> Array:
    text, data = entry
    of = _type(text)
    array: Array = np.frombuffer(base64.b64decode(data, validate=True), of.dtype)
    return array.reshape(of.shape)
