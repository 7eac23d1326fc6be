"""`Declared`: a kernel or an op as users call it. Its calls find what to run by the types of their arguments."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, cast

import jax

from tilekern import _jax, source
from tilekern.errors import FOREIGN, ArgumentError, UnsupportedError, checked, refuse
from tilekern.kernel import chunks, tuned
from tilekern.kernel.definition import (
    RESIDUALS,
    Definition,
    Options,
    Registers,
    Rules,
    Schedule,
    TypedCall,
    inherited_target,
    likely_target,
)
from tilekern.kernel.dispatch import call
from tilekern.kernel.primitive import Callee
from tilekern.kernel.signature import LAUNCH, Signature, check_argument, check_sizes, of_function
from tilekern.kernel.statics import python_numbers, static_key
from tilekern.lang.state import is_traced
from tilekern.lang.tiles import describe
from tilekern.lower.target import DEFAULT, Target, resolve

# The entries of a kernel's or op's caches.
_FUNCTIONS = 512
_TYPES = 512


class Prepared(NamedTuple):
    """What a call on arguments of given types runs.

    Attributes:
      callee: the kernel or op, for the primitive.
      call: the call.
      captured: arrays that the body closes over: further operands, after the arrays of the arguments.
    """

    callee: Callee
    call: TypedCall
    captured: tuple[Any, ...] = ()

    @property
    def is_reusable(self) -> bool:
        """True if later calls may use it, too: the body closes over no traced value."""
        return not any(isinstance(array, _jax.Tracer) for array in self.captured)


class Declared:
    """A function of arrays, declared by a decorator: call it inside or outside of `jax.jit`.

    Calls take the arrays and any keyword-only arguments; `target=` to lower for that target; and the launch options of
    GPUs, `num_warps=`, `num_stages=` and `num_ctas=`.

    Attributes:
      signature: its parameters.
    """

    # True if the function is traced for sizes that are symbols as for others.
    _takes_symbols = False

    def __init__(
        self,
        out_type: Callable[..., Any],
        function: Callable[..., Any],
        donate: tuple[str, ...] = (),
        linear: tuple[str, ...] = (),
        residuals: int = RESIDUALS,
    ) -> None:
        if not hasattr(function, "__code__"):
            raise ArgumentError(
                f"{describe(function)} cannot be made a {type(self).__name__.lower()}",
                expected="a function of Python, by def or lambda",
                got=f"an object of type {type(function).__name__}",
                fix="write a def that calls it; make what a functools.partial fixes keyword-only parameters",
            )
        loc = source.of_function(function.__code__)
        with source.at(loc):
            signature = of_function(function)
            _check_names(signature, "donates", "donate", donate)
            _check_names(signature, "is linear in", "linear", linear)
        definition = Definition(function, out_type, signature, donate, {}, Rules(linear), loc, residuals)
        definition.rules.callee = partial(_callee, weakref.ref(self), type(self), definition)
        self._begin(definition)

    def _begin(self, definition: Definition) -> None:
        functools.update_wrapper(self, definition.function)
        self.__signature__ = definition.signature.of_calls(self._count_outputs(definition))
        self._definition = definition
        self.signature: Signature = definition.signature
        self._functions = _jax.Cache[tuple[Any, ...], Callable[..., Any]](_FUNCTIONS)
        self._by_types = _jax.Cache[tuple[Any, ...], Prepared](_TYPES)
        # True from the first call whose body closed over traced values: later calls may do so again.
        self._captures_tracers = False

    @staticmethod
    def _count_outputs(definition: Definition) -> int:
        """The number of positional parameters that are outputs."""
        return 0

    def __get__(self, instance: object, owner: type | None = None) -> Self:
        """The kernel or op itself, also as an attribute of a class; so `help` shows the signature of calls."""
        return self

    def __repr__(self) -> str:
        return f"<tilekern {type(self).__name__.lower()} {self.signature.name}>"

    def __reduce__(self) -> str:
        """Pickled like a function, by its name in a module; so a copy is the object itself."""
        return str(vars(self)["__qualname__"])

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Call the kernel or op; see the class."""
        if is_traced(self._definition.function):
            raise UnsupportedError(
                f"{self.signature.name} calls itself",
                expected="a loop in the body, or calls one after the other in jitted code",
                got=f"a call of {self.signature.name} in a body that is traced for it",
                fix="use tk.fold or lax.while_loop; a kernel has no recursion",
            )
        inherited = inherited_target()
        if inherited is not None:
            keywords.setdefault("target", inherited)
        try:
            function = self._functions[static_key(keywords) if keywords else ()]
        except (KeyError, TypeError):
            args, keywords = self.signature.positional(args, keywords)
            function = self._function(keywords)
        try:
            return function(*map(_jax.array_of, args))
        except FOREIGN as error:
            refuse(error, self._definition.function, args, keywords, self.signature.name)
            raise

    @checked
    def schedule(self, target: str) -> Registers:
        """Declare the blocks for all targets whose name starts with `target`; the longest such name decides.

        The decorated function gets the inputs as `jax.ShapeDtypeStruct`s, and by keyword those static arguments, and
        the name of the `target`, that it has parameters for. It returns a dict of blocks, choices and launch options.
        """

        def register[S: Schedule](schedule: S) -> S:
            self._definition.schedules[target] = schedule
            return schedule

        return register

    @checked
    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the derivative: `rule(primals, tangents)` returns (results, their tangents).

        `primals` is the tuple of the inputs. `tangents` is like it, with None for each array whose tangent is zero, and
        the rule may return None for a tangent that is zero. By keyword it gets those static arguments, blocks
        and choices that it has parameters for. The rule is JAX code. For reverse mode it must compute tangents by plain
        JAX, or by kernels that are `linear` in them and have a transpose. Inputs that the kernel is linear in need no
        rule: it gets None for their tangents.
        """
        self._definition.rules.jvp = rule
        return rule

    @checked
    def deftranspose(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Declare the transpose of a kernel that is `linear` in some inputs: `rule(cotangents, *inputs)`.

        `cotangents` is like the results, with None for a cotangent that is zero. Of the inputs, arrays that the kernel
        is to be transposed in are `jax.ShapeDtypeStruct`s. The rule returns a dict from names of linear inputs to their
        cotangents; a name that is left out, or None, is zero. Static arguments and blocks come as in `defjvp`.
        """
        self._definition.rules.transpose = rule
        return rule

    # --- calls ---

    def _prepare(self, args: tuple[Any, ...], options: Options, target: Target) -> Prepared:
        """What a call runs, for arguments of given types; it is traced for `target` first."""
        raise NotImplementedError

    def _check(self, keywords: Mapping[str, Any]) -> Options:
        """What the keywords of a call say, checked."""
        if source.is_prebuilt(self._definition.loc):  # as `authoring.takes_python_numbers` does for functions
            keywords = {name: python_numbers(value) for name, value in keywords.items()}
        target = keywords.get("target")
        tunables = (*self.signature.tunables, *LAUNCH)
        blocks_of_call = {n: v for n, v in keywords.items() if n in tunables and v is not None}
        statics = self.signature.check_statics(keywords)
        blocks = self.signature.check_blocks(blocks_of_call, "the call")
        return Options(statics, blocks, None if target is None else resolve(target))

    def _function(self, keywords: Mapping[str, Any]) -> Callable[..., Any]:
        """The function of the arrays for given static arguments: jitted, so that JAX dispatches repeated calls."""
        options = self._check(keywords)
        key = static_key(keywords)
        if key in self._functions:
            return self._functions[key]

        def run(*args: Any) -> Any:
            if not self._takes_symbols and _jax.has_symbols(args):
                return self._in_chunks(args, options)
            prepared = self._prepared(args, options)
            if not prepared.is_reusable and not self._captures_tracers:
                # The functions so far would give the values that this call closes over to later calls, too.
                self._captures_tracers = True
                self._functions.clear()
            results = call(prepared.callee, *jax.tree.leaves(args), *prepared.captured)
            return prepared.call.results.pack(results)

        def run_anew(*args: Any) -> Any:
            """Only under a trace can the body close over traced values: there it is traced for each call."""
            return (run if _jax.is_tracing() else jitted)(*args)

        run.__name__ = run.__qualname__ = self.signature.name  # JAX names the function in errors about its arguments
        jitted: Callable[..., Any] = jax.jit(run)
        self._functions[key] = function = run_anew if self._captures_tracers else jitted
        return function

    def _prepared(self, args: tuple[Any, ...], options: Options, target: Target | None = None) -> Prepared:
        """The prepared call: from the cache, if an earlier call had arguments of the same types.

        Else it is traced for `target`; by default for the target that the call will most likely be lowered for.
        """
        with_paths, tree = _jax.flatten_with_path(args)
        by_name = {self.signature.leaf_name(path): leaf for path, leaf in with_paths}
        types = tuple(check_argument(self.signature.name, name, leaf) for name, leaf in by_name.items())
        if len(args) > len(self.signature.arrays):
            raise ArgumentError(
                f"{self.signature.name} takes fewer arrays",
                expected=f"the inputs among {', '.join(self.signature.arrays)}",
                got=f"{len(args)} positional arguments",
                fix="outputs are not passed; static arguments go by keyword",
            )
        arguments, first = jax.tree.unflatten(tree, types), target or likely_target(options.asked)
        if _jax.has_symbols(types):
            if not self._takes_symbols:
                check_sizes(self.signature.name, by_name)
            return self._prepare(arguments, options, first)  # symbols of two exports cannot be compared
        statics, blocks = static_key(options.statics), static_key(options.blocks)
        key = (tree, types, statics, blocks, options.asked, _jax.settings(), tuned.active())
        cached = self._by_types.get(key)
        if cached is not None and not (self._captures_tracers and _jax.is_tracing()):
            return cached
        prepared = self._prepare(arguments, options, first)
        if not prepared.is_reusable:
            return prepared
        # The body closes over known values, which stay the values of its first trace, as under jax.jit.
        self._by_types[key] = cached or prepared
        return cached or prepared

    def _in_chunks(self, args: tuple[Any, ...], options: Options) -> Any:
        """The results of a call in which sizes are symbols of `jax.export`."""
        paths = [self.signature.leaf_name(path) for path, _ in _jax.flatten_with_path(args)[0]]
        return chunks.results_of(paths, args, lambda types: self._prepared(types, options))

    def _traced(self, args: Sequence[Any], keywords: Mapping[str, Any]) -> Prepared:
        """What a call with these arguments runs, which may be `jax.ShapeDtypeStruct`s: traced for stages.

        Stages without a target show the portable one's, which is the same on every machine.
        """
        inputs, keywords_left = self.signature.positional(args, keywords)
        options = self._check(keywords_left)
        return self._prepared(inputs, options, options.asked or DEFAULT)


def _check_names(signature: Signature, verb: str, option: str, names: Any) -> None:
    are_parameters = isinstance(names, (tuple, list)) and set(signature.arrays).issuperset(cast(Sequence[Any], names))
    if not are_parameters:
        raise ArgumentError(
            f"{signature.name} {verb} something that is no parameter",
            expected=f"names among {', '.join(signature.arrays)}",
            got=f"{option} = {names!r}",
            fix="name positional parameters that are inputs",
        )


def _callee(living: weakref.ref[Declared], kind: type[Declared], definition: Definition) -> Declared:
    """The kernel or op behind a weak reference, or a new one of the same definition if it was collected.

    A cached trace may outlive the kernel that it calls.
    """
    declared = living()
    if declared is None:
        declared = kind.__new__(kind)
        declared._begin(definition)  # pyright: ignore[reportPrivateUsage] -- a part of Declared
    return declared
