"""The stages of a kernel, as those of `jax.jit`: `Traced`, `Lowered`, `Compiled`; and `interpret`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tilekern import _jax
from tilekern.errors import ArgumentError, TargetError
from tilekern.ir.core import Func
from tilekern.ir.interpret import interpret as _interpret
from tilekern.kernel.arguments import check_argument
from tilekern.kernel.family import DeclaredFamily, KernelFamily
from tilekern.kernel.inner import Inner
from tilekern.kernel.packed import packed, unpacked
from tilekern.lang.tiles import describe
from tilekern.lower.lowering import CompiledProgram
from tilekern.lower.target import Target, resolve


class Traced:
    """A kernel traced for given argument types; prints as block IR.

    Attributes:
      ir: the block IR, with the blocks of the default target.
    """

    def __init__(self, family: KernelFamily | Inner) -> None:
        self._family = family
        self.ir: Func = family.func()

    def __str__(self) -> str:
        return str(self.ir)

    def lower(self, target: str = "cpu") -> Lowered:
        """Lower to a target, with the blocks that the kernel's schedule has for it."""
        return Lowered(self._family, resolve(target))


class Lowered:
    """A kernel lowered to a target.

    Attributes:
      target: its name.
      ir: the block IR that was lowered, with the target's blocks.
      text: the target's program: StableHLO for "cpu:xla", Triton source (Python) for "cuda:…", Mosaic's
        MLIR for "tpu:…".
    """

    def __init__(self, family: KernelFamily | Inner, target: Target) -> None:
        self._family, self.target = family, target.name
        self.ir: Func = family.func(target)
        _check_closed(family)
        self._lowered = family.lowered_or_portable(target) if target.falls_back else family.lowered(target)
        self.text: str = self._lowered.text

    def __str__(self) -> str:
        return self.text

    @property
    def plan(self) -> str:
        """What became of loops and accesses, in words.

        For "tpu:…" of each, what that takes of vector memory, and why; for "cpu:llvm" the loop nests, and the tiles
        that they keep.
        """
        return self._lowered.plan

    def interpret(self, *arrays: Any) -> Any:
        """Run the program on this machine's CPU, without the target's hardware; the outputs are NumPy arrays.

        What runs is `text` itself: for "cuda:…" in Triton's interpreter, which checks every access against the arrays.
        """
        operands = zip(_operands(self._family, arrays), self.ir.inputs, strict=True)
        inputs = [np.asarray(x, p.ref.dtype) for x, p in operands]
        return _results(self._family, self._lowered.interpret(*inputs))

    def compile(self) -> Compiled:
        """Compile for the target. Its hardware need not be here, unless the result is called."""
        return Compiled(self._family, self._lowered.compile())


class Compiled:
    """A compiled kernel: call it with arrays of the types it was traced for."""

    def __init__(self, family: KernelFamily | Inner, compiled: CompiledProgram) -> None:
        self._family, self._compiled = family, compiled

    def __call__(self, *arrays: Any) -> Any:
        found = self._compiled(*_operands(self._family, arrays))
        return self._family.results.pack(unpacked(found, self._family.outputs))

    @property
    def asm(self) -> Mapping[str, Any]:
        """What the compiler made, by language.

        "ttir", "ttgir", "ptx", "cubin" and "sass" on a GPU, "llvm" and "s" (assembly) by LLVM, "hlo" by XLA.
        """
        return self._compiled.asm

    @property
    def resources(self) -> Any:
        """What one program takes of a GPU.

        `registers` of 32 bits for each thread, `spills` and `shared_bytes` in bytes, `threads`, and `occupancy`: the
        share of a multiprocessor's warps that can be resident.
        """
        return self._compiled.resources

    def memory_analysis(self) -> Any:
        """XLA's account of the program's memory; `.temp_size_in_bytes` is its scratch."""
        return self._compiled.memory_analysis()


def interpret(traced: Traced) -> Callable[..., Any]:
    """A function that runs a traced kernel on NumPy arrays, in the interpreter that defines what it means.

    Slow, and strict: it finds what no accelerator tells you. The outputs are NumPy arrays.

    Raises (when the function is called):
      tilekern.errors.Unwritten: an output element is never stored, or loaded before it is.
      tilekern.errors.WriteConflict: two programs store the same element.
      tilekern.errors.OrderDependence: the result depends on the order in which programs run.
      tilekern.errors.OutOfBounds: an access left an array: a bug of the compiler.
    """
    if not isinstance(traced, Traced):  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass anything
        raise ArgumentError(
            "tk.interpret takes a traced kernel",
            expected="what kernel.trace(x, ...) returns",
            got=describe(traced),
            fix="write tk.interpret(kernel.trace(x, y))(x, y); of a function around kernels none can be interpreted, "
            "of an op each kernel: tk.interpret(op.trace(x).kernels[0])",
        )
    family = traced._family  # pyright: ignore[reportPrivateUsage] -- stages are one module

    def run(*arrays: Any) -> Any:
        operands = zip(_operands(family, arrays), traced.ir.inputs, strict=True)
        return _results(family, _interpret(traced.ir, *[np.asarray(x, p.ref.dtype) for x, p in operands]))

    return run


def _results(family: KernelFamily | Inner, found: Sequence[Any]) -> Any:
    return family.results.pack([np.asarray(x) for x in unpacked(found, family.outputs)])


def _operands(family: KernelFamily | Inner, arguments: tuple[Any, ...]) -> list[Any]:
    """The flat operands: the arguments' arrays, then what the body closes over."""
    leaves = checked(family, arguments)
    _check_closed(family)
    return packed([*leaves, *family.captured])


def checked(family: DeclaredFamily | Inner, arguments: tuple[Any, ...]) -> list[Any]:
    """The arguments' arrays, which must have the types that a kernel or an op was traced for."""
    found, wanted = _jax.structure(arguments), _jax.structure(family.arguments)
    if found != wanted:
        raise ArgumentError(
            f"{family.name} was traced for other arguments",
            expected=f"arguments of the structure {wanted}",
            got=f"{found}",
            fix="trace it again for these arguments",
        )
    with_paths, _ = _jax.flatten_with_path(arguments)
    for (path, leaf), aval in zip(with_paths, jax.tree.leaves(family.arguments), strict=True):
        _check_type(family, family.signature.leaf_name(path), leaf, aval)
    return jax.tree.leaves(arguments)


def _check_closed(family: KernelFamily | Inner) -> None:
    if family.captures_tracers:
        raise TargetError(
            f"{family.name} closes over values that are being traced, and cannot be lowered by itself",
            expected="a kernel whose body closes over known values only",
            got="traced values of an enclosing jax.jit",
            fix="call the kernel inside that function, or pass the values as arguments",
        )


def _check_type(family: DeclaredFamily | Inner, name: str, leaf: Any, wanted: jax.ShapeDtypeStruct) -> None:
    found = check_argument(family.name, name, leaf)
    if found == wanted:
        return
    raise ArgumentError(
        f"{family.name} was traced for other arguments",
        expected=f"{name} = {describe(wanted)}",
        got=f"{name} = {describe(found)}",
        fix="trace it again for these arguments",
    )
