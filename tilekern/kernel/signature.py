"""The signature of a kernel: parameters that are arrays, static arguments or blocks, and their checks."""

from __future__ import annotations

import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tilekern import _jax
from tilekern.errors import ArgumentError
from tilekern.ir.records import record
from tilekern.ir.types import FOUR_BITS, dtype_name, is_dtype
from tilekern.kernel.choice import Tunable, Values, values_of
from tilekern.kernel.statics import is_hashable
from tilekern.lang.tiles import describe, static_int, way_out

LAUNCH = ("num_warps", "num_stages", "num_ctas")
"""Options besides blocks that a schedule or a call may give; targets without such a thing ignore them.

num_warps: the number of warps of a GPU program, of 32 threads each, or 64 on AMD's. num_stages: the number of
iterations of a loop that may have loads in flight. num_ctas: the number of thread blocks of a cluster, which compute a
program together, for the emitter "gluon"."""

if TYPE_CHECKING:
    Block = Annotated[int, "a block size"]
    """Annotates a keyword-only parameter of a kernel as a block size."""
else:

    class Block:
        """Annotates a keyword-only parameter of a kernel as a block size: tunable, and without influence on the result.

        A block is an int, `def f(x, out, *, block: tk.Block = 128)`. The call's own size is taken, else a schedule's,
        else a model's of the target, else the default. The model keeps a default unless another size is far faster.
        """


@record
class Signature:
    """The parameters of a kernel.

    Attributes:
      name: the name of the kernel.
      arrays: the positional parameters: inputs, then outputs.
      blocks: the keyword-only parameters that are block sizes, with their defaults.
      statics: the other keyword-only parameters, with their defaults (`inspect.Parameter.empty` if none).
      hints: the annotations of the statics.
      choices: the keyword-only parameters that are choices, with their values.
    """

    name: str
    arrays: tuple[str, ...]
    blocks: Mapping[str, Any]
    statics: Mapping[str, Any]
    hints: Mapping[str, Any]
    choices: Mapping[str, Values] = field(default_factory=dict[str, Values])

    @property
    def tunables(self) -> dict[str, Any]:
        """Blocks and choices, which schedules give, with their defaults (`inspect.Parameter.empty` if none)."""
        return {**self.blocks, **{name: choice.default for name, choice in self.choices.items()}}

    @property
    def defaults(self) -> dict[str, Tunable]:
        """The defaults of blocks and choices that have one."""
        blocks = {name: size for name, size in self.blocks.items() if isinstance(size, int)}
        empty = inspect.Parameter.empty
        return blocks | {name: choice.default for name, choice in self.choices.items() if choice.default is not empty}

    def of_calls(self, outputs: int) -> inspect.Signature:
        """The signature of calls, for `help` and editors.

        Args:
          outputs: how many of the last positional parameters are outputs, which calls do not give.
        """
        kind = inspect.Parameter
        inputs = self.arrays[: len(self.arrays) - outputs]
        parameters = [kind(name, kind.POSITIONAL_OR_KEYWORD, annotation="Any") for name in inputs]
        for name, default in self.statics.items():
            hint = self.hints.get(name, kind.empty)
            parameters.append(kind(name, kind.KEYWORD_ONLY, default=default, annotation=hint or kind.empty))
        options = dict.fromkeys(self.blocks, "int | None")
        options |= {name: choice.hint for name, choice in self.choices.items()}
        options |= {"target": "str | None", **dict.fromkeys(LAUNCH, "int | None")}
        for name, hint in options.items():
            parameters.append(kind(name, kind.KEYWORD_ONLY, default=None, annotation=hint))
        return inspect.Signature(parameters)

    def positional(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs in order, and all other keywords; inputs that were passed by keyword move to their place."""
        inputs, keywords_left = list(args), dict(keywords)
        for name in self.arrays[len(args) :]:
            if name not in keywords_left:
                break
            inputs.append(keywords_left.pop(name))
        allowed = {*self.tunables, *self.statics, *LAUNCH, "target"}
        for name, value in keywords_left.items():
            if name not in allowed:
                raise ArgumentError(
                    f"{self.name} has no keyword argument {name!r}",
                    expected=f"one of {', '.join(sorted(allowed))}",
                    got=f"{name} = {describe(value)}",
                    fix="arrays are given in the order of the kernel's parameters",
                )
        return tuple(inputs), keywords_left

    def leaf_name(self, path: tuple[Any, ...]) -> str:
        """The name of an array, such as `x['a']`, by its path in the tuple of the arguments."""
        position: int = path[0].idx
        name = self.arrays[position] if position < len(self.arrays) else f"argument {position}"
        return name + jax.tree_util.keystr(path[1:])

    def check_statics(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The value of every static parameter, checked: from `values`, else its default."""
        checked: dict[str, Any] = {}
        for name, default in self.statics.items():
            value = values.get(name, default)
            if value is inspect.Parameter.empty:
                raise ArgumentError(
                    f"{self.name} needs the keyword argument {name}",
                    expected=f"{name}=...",
                    got="no value",
                    fix="give it, or give the parameter a default",
                )
            self._check_static(name, value)
            checked[name] = value
        return checked

    def _check_static(self, name: str, value: Any) -> None:
        hint = self.hints.get(name)
        if isinstance(value, _jax.Tracer) or not is_hashable(value):
            raise ArgumentError(
                f"the keyword argument {name} of {self.name} is static and must be hashable",
                expected="a hashable Python value",
                got=f"{name} = {describe(value)}",
                fix="pass arrays as positional parameters; lists as tuples",
            )
        if not _accepts(hint, value):
            raise ArgumentError(
                f"the keyword argument {name} of {self.name} has the wrong type",
                expected=f"{name}: {getattr(hint, '__name__', None) or hint}",
                got=f"{name} = {describe(value)}",
                fix="convert it",
            )

    def takes(self, values: Mapping[str, Any]) -> bool:
        """True if `check_blocks` takes the values."""
        try:
            self.check_blocks(values, "")
        except ArgumentError:
            return False
        return True

    def check_blocks(self, values: Mapping[str, Any], origin: str) -> dict[str, Tunable]:
        """Block sizes, launch options and choices from a call or a schedule.

        Block sizes and launch options are checked to be ints of at least 1, choices to be one of their values. `origin`
        names the call or the schedule in errors.
        """
        return {name: self._check_block(name, value, origin) for name, value in values.items()}

    def _check_block(self, name: str, value: Any, origin: str) -> Tunable:
        if name in self.choices:
            return self.choices[name].check(name, value, origin)
        if name not in self.blocks and name not in LAUNCH:
            raise ArgumentError(
                f"{origin} names a block that {self.name} does not have",
                expected=f"one of {', '.join((*self.tunables, *LAUNCH))}",
                got=f"{name} = {describe(value)}",
                fix="annotate the kernel's parameter with tk.Block or tk.Choice, or drop the entry",
            )
        if not is_hashable(value):
            raise ArgumentError(
                f"{name} must be a static integer of at least 1",
                expected="a Python int >= 1",
                got=f"{name} = {describe(value)}, an array",
                fix=f"give a Python int, such as {name}=int(...)",
            )
        return static_int(value, name, 1)


def of_function(function: Callable[..., Any]) -> Signature:
    """The signature of a kernel's function."""
    name = function.__name__
    parameters = inspect.signature(function).parameters.values()
    arrays = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    if len(arrays) + len(keywords) != len(parameters) or not arrays:
        raise ArgumentError(
            f"the signature of the kernel {name} is not one of a kernel",
            expected="positional parameters for arrays (at least one output), keyword-only ones for static values",
            got=f"{name}{inspect.signature(function)}",
            fix="name every array; pass a tuple of arrays as one parameter",
        )
    hints = _hints(function)
    blocks = {p.name: p.default for p in keywords if _is_block(hints.get(p.name))}
    choices = {p.name: values_of(name, p.name, hints.get(p.name), p.default) for p in keywords}
    choices = {name: values for name, values in choices.items() if values is not None}
    statics = {p.name: p.default for p in keywords if p.name not in blocks and p.name not in choices}
    for reserved in ("target", "emitter", *LAUNCH):
        if reserved in statics or reserved in blocks or reserved in choices:
            raise ArgumentError(
                f"the kernel {name} has a parameter named {reserved}",
                expected="any other name",
                got=reserved,
                fix=f"rename it: {reserved}= is for the machine to lower for, how to emit, or how to launch there",
            )
    return Signature(name, tuple(arrays), blocks, statics, {n: hints.get(n) for n in statics}, choices)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function, include_extras=True)
    except Exception:  # annotations may name anything, and need not exist at run time
        return {name: _resolved(hint, function) for name, hint in inspect.get_annotations(function).items()}


def _resolved(hint: Any, function: Callable[..., Any]) -> Any:
    """The annotation of a choice with its names resolved; all others as they are."""
    if not isinstance(hint, str) or "Choice" not in hint:
        return hint
    holder = types.SimpleNamespace(__annotations__={"hint": hint})
    try:
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)["hint"]
    except Exception:  # as above; `values_of` refuses it
        return hint


def _is_block(hint: Any) -> bool:
    if isinstance(hint, str):
        return hint.rpartition(".")[2] == "Block"
    return hint is Block


def _accepts(hint: Any, value: Any) -> bool:
    """True if a value fits an annotation of plain classes, literals and unions, and for all other annotations."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_accepts(h, value) for h in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is None or hint is types.NoneType:
        return value is None or hint is None
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is int:
        return hasattr(value, "__index__")
    if hint is float:
        return _is_real(value)
    return isinstance(value, hint) if hint in (bool, str) else True


def _is_real(value: Any) -> bool:
    """True for a value that `float` takes: also an int, unless it is too large."""
    try:
        return hasattr(value, "__float__") and (not isinstance(value, int) or math.isfinite(float(value)))
    except OverflowError:
        return False


def check_sizes(name: str, arrays: Mapping[str, Any]) -> None:
    """Refuse arrays with dims of unknown size, as `jax.export` has them, in a call of `name`."""
    for path, array in arrays.items():
        if _jax.has_symbols(array):
            raise ArgumentError(
                f"{name} needs arrays of known sizes",
                expected="sizes that are known when the call is traced; a batch under jax.vmap may be of any size",
                got=f"{path} = {describe(array)}",
                fix=f"take jax.vmap of {name} over that dim, if its elements do not mix; or export it for each size",
            )


def check_argument(name: str, path: str, leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape of an array argument and its dtype, as JAX would canonicalise it; 4-bit dtypes stay.

    Raises:
      ArgumentError: the dtype is none of the language's, or the argument is a Ref of JAX.
    """
    if isinstance(leaf, jax.Ref):
        raise ArgumentError(
            f"{name} takes arrays, and no Ref of JAX",
            expected="an array",
            got=f"{path} = {jax.typeof(leaf)}",
            fix=f"pass what it holds, {path}[...], and store the result to it",
        )
    shaped = leaf if _jax.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) else np.asarray(leaf)
    dtype: Any = shaped.dtype
    plain = not jnp.issubdtype(dtype, jax.dtypes.extended)
    if plain and np.dtype(dtype) in FOUR_BITS:
        return _of_pairs(name, path, shaped)
    if plain and is_dtype(np.dtype(dtype)):
        return jax.ShapeDtypeStruct(shaped.shape, jax.dtypes.canonicalize_dtype(dtype))
    raise ArgumentError(
        f"{name} cannot take an array of this dtype",
        expected="a float, integer or bool array",
        got=f"{path} = {dtype_name(dtype) if plain else dtype}{list(shaped.shape)}",
        fix=way_out(dtype),
    )


def _of_pairs(name: str, path: str, shaped: Any) -> jax.ShapeDtypeStruct:
    if shaped.shape:
        return jax.ShapeDtypeStruct(shaped.shape, shaped.dtype)
    raise ArgumentError(
        f"{name} cannot take a single number of 4 bits",
        expected=f"an array of {np.dtype(shaped.dtype)} with a dim along which two numbers share a byte",
        got=f"{path} = {np.dtype(shaped.dtype)}[]",
        fix="reshape it to one dim, or cast it with .astype(jnp.int8)",
    )


def select(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The `values` that `function` has keyword parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(values)
    names = {p.name for p in parameters}
    return {name: value for name, value in values.items() if name in names}
