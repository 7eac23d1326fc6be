"""The stages of a kernel, like the stages of `jax.jit`: `Traced`, `Lowered`, `Compiled`; and `interpret`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from tilekern.errors import ArgumentError, TargetError, checked
from tilekern.ir.analysis.costs import Cost, cost_of
from tilekern.ir.core import Func
from tilekern.kernel.derived_rules import BackwardPass, tangent_of
from tilekern.kernel.dispatch import call
from tilekern.kernel.instance import Instance, Version
from tilekern.kernel.interface import Interface, of_flat_arrays
from tilekern.kernel.packed import packed
from tilekern.lang.tiles import describe
from tilekern.lower.backend import CompiledProgram
from tilekern.lower.resources import Resources
from tilekern.lower.target import Target, resolve

if TYPE_CHECKING:
    from tilekern.estimate import Estimate
    from tilekern.estimate.explain import Explanation
    from tilekern.ir.picture import Picture


class Traced:
    """A kernel traced for given argument types; prints as block IR.

    Attributes:
      ir: the block IR, with the blocks of the default target.
    """

    def __init__(self, kernel: Instance, interface: Interface, target: Target) -> None:
        self._kernel, self._interface, self._target = kernel, interface, target
        self._version = kernel.version(target)
        self.ir: Func = self._version.func

    def __str__(self) -> str:
        return str(self.ir)

    @checked
    def draw(self, program: Sequence[int] | None = None) -> Picture:
        """A picture of the arrays: the tiles of all programs, the lanes masked at edges, and the tiles of one program.

        Notebooks show it; `str(picture)` is a file of SVG.

        Args:
          program: the tile index of the coloured program along each axis of the grid; None for the one in the middle.

        Raises:
          tilekern.errors.ArgumentError: the grid has no such program.

        Example:
          >>> import jax, jax.numpy as jnp, tilekern as tk
          >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
          ... def double(x, out):
          ...     i = tk.parallel(x.shape[0], 4)
          ...     out[i] = x[i] * 2
          >>> str(double.trace(jnp.arange(10)).draw(program=(2,)))
          '<svg viewBox=...</svg>'
        """
        from tilekern.ir.picture import picture

        return picture(self.ir, program)

    def _repr_html_(self) -> str:
        return f"{self.draw().svg}<pre>{escape(str(self))}</pre>"

    @checked
    def __call__(self, *arrays: Any) -> Any:
        """Call the kernel on arrays of the types it was traced for, inside or outside of `jax.jit`, as by its name."""
        leaves = self._interface.flat(arrays)
        return self._interface.results.pack(call(self._kernel, *leaves, *self._interface.captured))

    @checked
    def save(self, path: str | PathLike[str], targets: Sequence[str] | None = None) -> None:
        """Write the block IR to a file, which `tilekern.load` reads where the kernel's source need not be.

        The file is text: the version of its format; the kernel's name, types and static arguments; and the block IR for
        each target, with its blocks and launch options. It holds the names of source files and the lines of each
        operation, for errors. It is written whole or not at all.

        Args:
          path: the file.
          targets: the targets to save the kernel for, besides the target of the trace. By default all targets but those
            for which the schedule raises an error.

        Raises:
          tilekern.errors.TargetError: there is no such target; or the body closes over values that are being traced.
          tilekern.errors.ArgumentError: arguments are in containers other than tuples, lists and dicts.

        Example:
          >>> import jax, jax.numpy as jnp, pathlib, tempfile, tilekern as tk
          >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
          ... def double(x, out):
          ...     out[...] = x[...] * 2
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     path = pathlib.Path(folder, "double.tile")
          ...     double.trace(jnp.arange(3)).save(path)
          ...     tk.load(path)(jnp.arange(3))
          Array([0, 2, 4], dtype=int32)
        """
        from tilekern.kernel.file_format import encode

        _check_closed(self._interface)
        _write_whole(Path(path), encode(self._kernel, self._interface, self._target, targets))

    def cost(self) -> Cost:
        """The floating-point operations and bytes of a call, with the blocks of the default target."""
        return cost_of(self.ir)

    @checked
    def lower(self, target: str = "cpu", emitter: str | None = None) -> Lowered:
        """Lower to a target, with the blocks that the kernel's schedule has for it.

        Args:
          target: its name.
          emitter: for "cuda:sm_90" also "gluon", for a warp-specialised program in Gluon, or "auto", for that where
            the kernel has such a form and it is worth it; "triton", or None, for one in Triton.

        Raises:
          tilekern.errors.TargetError: there is no such target or emitter, or it does not take the kernel; at the user's
            line.
        """
        return Lowered(self._kernel, self._interface, resolve(target, emitter))

    @checked
    def gradient(self, wrt: str | Sequence[str] | None = None) -> Gradient:
        """The kernels that `jax.jvp` and `jax.grad` run, derived from the block IR.

        A kernel whose author states rules (`Kernel.defjvp`) runs the rules instead.

        Args:
          wrt: names of the parameters that are differentiated, or one name; None for all inputs of floats.

        Raises:
          tilekern.errors.NotDifferentiableError: an op has no derivative, or the carries of a loop take more
            memory than the kernel's `residuals`; at the user's line.
          tilekern.errors.ArgumentError: a name is of no input, or of none of floats.

        Example:
          >>> import jax, jax.numpy as jnp, tilekern as tk
          >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
          ... def square(x, out):
          ...     out[...] = x[...] * x[...]
          >>> print(square.trace(jnp.ones(3)).gradient().backward[0])
          func @square_backward(%x: ref<f32[3], in>, %out_ct: ref<f32[3], in>, %x_ct: ref<f32[3], out>) {
            %0 = load %x[0 +: 3!] : f32[3]
            %1 = load %out_ct[0 +: 3!] : f32[3]
            %2 = add(%1, %1) : f32[3]
            %3 = mul(%2, %0) : f32[3]
            store %3 to %x_ct[0 +: 3!]
          }
          <BLANKLINE>
        """
        return Gradient(self._kernel, self._interface, self._target, wrt)

    @checked
    def interpret(self, *arrays: Any) -> Any:
        """Run the block IR on NumPy arrays, in the interpreter that defines the meaning of every operation.

        It is strict: it finds errors that no accelerator reports. Attention of 512 queries and 4 heads takes it a tenth
        of a second. The outputs are NumPy arrays.

        Raises:
          tilekern.errors.UnwrittenError: an output element is never stored, or loaded before it is.
          tilekern.errors.WriteConflictError: two programs store the same element.
          tilekern.errors.OrderDependenceError: the result depends on the order in which programs run.
          tilekern.errors.OutOfBoundsError: an access left an array, or wrote at a position that was read outside of
            one: a bug of the compiler.

        Example:
          >>> import jax, jax.numpy as jnp, tilekern as tk
          >>> @tk.kernel(out_type=lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
          ... def double(x, out):
          ...     out[...] = x[...] * 2
          >>> double.trace(jnp.arange(3)).interpret(jnp.arange(3))
          array([0, 2, 4], dtype=int32)
        """
        from tilekern.ir.interpret import interpret

        return self._interface.packed_arrays(interpret(self.ir, *_inputs(self._interface, self._version, arrays)))


class Gradient:
    """The kernels of the derivatives of a kernel; prints as their block IR.

    Attributes:
      tangent: the kernel of forward mode: from the inputs and the tangents of differentiated inputs, in this order, to
        the tangents of the results.
      backward: the kernels of reverse mode, in their order. Together they compute the cotangents of differentiated
        inputs. Each takes inputs of the kernel, cotangents of results, and results of earlier kernels.
    """

    def __init__(self, kernel: Instance, interface: Interface, target: Target, wrt: str | Sequence[str] | None) -> None:
        moving = interface.moving(wrt)
        along = tangent_of(kernel, (*moving, *(False for _ in interface.captured)))
        against = BackwardPass(along, (*(False for _ in kernel.types), *(True for m in moving if m)))
        self.tangent = Traced(along, of_flat_arrays(along, target), target)
        stages = against.stages(target)
        self.backward: tuple[Traced, ...] = tuple(Traced(s, of_flat_arrays(s, target), target) for s in stages)

    def __str__(self) -> str:
        return "\n".join(map(str, (self.tangent, *self.backward)))


class Lowered:
    """A kernel lowered to a target.

    Attributes:
      target: its name.
      ir: the block IR that was lowered, with the target's blocks.
      text: the target's program: StableHLO for "cpu:xla", LLVM IR for "cpu:llvm", Triton source (Python) for
        "cuda:…", Mosaic's MLIR for "tpu:…".
    """

    def __init__(self, kernel: Instance, interface: Interface, target: Target) -> None:
        _check_closed(interface)
        self.target, self._interface = target.name, interface
        serve = kernel.lowered_or_portable if target.fallback == "always" else kernel.served
        served, self._lowered = serve(target)
        self._kernel, self._served, self._version = kernel, served, kernel.version(served)
        self.ir: Func = self._version.func
        self.text: str = self._lowered.text

    def __str__(self) -> str:
        return self.text

    @checked
    def draw(self, program: Sequence[int] | None = None) -> Picture:
        """A picture of the arrays with the target's blocks, see `Traced.draw`."""
        from tilekern.ir.picture import picture

        return picture(self.ir, program)

    def _repr_html_(self) -> str:
        parts = {"Plan": self.plan, f"Program for {self.target}": self.text}
        details = (
            f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>" for name, text in parts.items()
        )
        return f"{self.draw().svg}{''.join(details)}"

    @property
    def plan(self) -> str:
        """The plan of the program, in words: loops, tiles, copies.

        For "tpu:…" the loops and accesses, their vector memory, and why; for "cpu:llvm" the loop nests, and the tiles
        that they keep; for "cuda:…" the launch, the order of programs, their loops and copies; for "cpu:xla" how many
        programs XLA computes at once.
        """
        return self._lowered.plan

    def cost(self) -> Cost:
        """The floating-point operations and bytes of a call, with the target's blocks."""
        return cost_of(self.ir)

    @checked
    def interpret(self, *arrays: Any) -> Any:
        """Run the program on this machine's CPU, without the target's hardware; the outputs are NumPy arrays.

        It runs `text` itself: for "cuda:…" in Triton's interpreter, which checks every access against the arrays.
        """
        outputs = self._lowered.interpret(*_inputs(self._interface, self._version, arrays))
        return self._interface.packed_arrays(outputs)

    def compile(self) -> Compiled:
        """Compile for the target. Its hardware need not be here, unless the result is called."""
        return Compiled(self, self._interface, self._version, self._lowered.compile())

    @checked
    def estimate(self, **extents: Any) -> Estimate:
        """The estimated time of a call on the target, whose hardware need not be here, and where the time goes.

        GPUs and TPUs: a model executes the machine code. "cpu:llvm": a roofline of rates that are measured once on
        this machine.

        Args:
          extents: by the name of an input its values, or the number that all of its elements have. They are needed
            where values of the array decide how often a loop runs.

        Raises:
          tilekern.errors.EstimateError: such values are missing; or there is no model of the target, or it cannot
            follow the program.
          tilekern.errors.ArgumentError: the kernel has no such input, or the values do not fit it.
        """
        from tilekern.estimate import estimate

        return estimate(self._lowered, self._served, self._values(), extents)

    @checked
    def explain(self, budget: float | None = None, **extents: Any) -> Explanation:
        """What the target made of each line of the kernel, its part of the work, the memory, and changes that help.

        It prints as text; notebooks show a page. Half and double of each block and launch option are compiled and
        estimated, one after the other.

        Args:
          budget: seconds for these trials; a trial that has begun is finished. 0 for none. By default 1 on CPUs, and
            10 elsewhere; less where the estimate of the kernel itself takes long, so that an explanation mostly takes
            at most 2 or 15 seconds. `explanation.untried` names the changes that were not tried.
          extents: as for `estimate`. Where they are missing, the explanation has no estimate.

        Raises:
          tilekern.errors.EstimateError: the target is "cpu:xla".
          tilekern.errors.ArgumentError: the kernel has no such input, the values do not fit it, or the budget is no
            number of seconds from 0.
        """
        from tilekern.estimate.explain import Variants, explain

        tuning, served = self._kernel.tuning, self._served
        variants = None
        if tuning is not None:
            sizes = {name: size for name, size in tuning.settings(served).items() if type(size) is int}
            if sizes:
                variants = Variants(sizes, lambda changes: tuning.varied(changes, None).lowered(served))
        return explain(self._lowered, self._served, self._values(), extents, variants, budget)

    def _values(self) -> list[Any]:
        """For each input of the program the array if the body closes over it, else None."""
        leaves = jax.tree.leaves(self._interface.arguments)
        return self._version.inputs([*(None for _ in leaves), *map(np.asarray, self._interface.captured)])


class Compiled:
    """A compiled kernel: call it with arrays of the types it was traced for."""

    def __init__(self, lowered: Lowered, interface: Interface, version: Version, compiled: CompiledProgram) -> None:
        self._interface, self._version, self._compiled = interface, version, compiled
        self._lowered = lowered

    def estimate(self, **extents: Any) -> Estimate:
        """The estimated time of a call, see `Lowered.estimate`."""
        return self._lowered.estimate(**extents)

    @checked
    def __call__(self, *arrays: Any) -> Any:
        return self._interface.packed(self._compiled(*_operands(self._interface, self._version, arrays)))

    @checked
    def interpret(self, *arrays: Any, races: bool = False) -> Any:
        """Run the compiled program on this machine's CPU, without the target's hardware; the outputs are NumPy arrays.

        For NVIDIA GPUs of compute capability 8.0 to 9.0 it runs the PTX, an instruction at a time, with all warps,
        shared memory, barriers, tensor copies and tensor cores: some 10 to 1000 times slower than `Lowered.interpret`.

        Args:
          arrays: the kernel's arguments.
          races: refuse accesses of shared memory that no barrier orders; some four times slower.

        Raises:
          tilekern.errors.OutOfBoundsError: an access is outside of all arrays, or of shared memory, or not aligned.
          tilekern.errors.UnwrittenError: a byte of a result is never stored.
          tilekern.errors.WriteConflictError: two thread blocks store to one byte.
          tilekern.errors.InterpreterError: a race, a deadlock, or an instruction that the interpreter does not know.
          tilekern.errors.TargetError: there is no interpreter of the target's machine code.
        """
        run = getattr(self._compiled, "interpret", None)
        if run is None:
            raise TargetError(
                f"there is no interpreter of compiled programs for {self._lowered.target}",
                expected="a target such as cuda:sm_80 or cuda:sm_90",
                got=f"target = {self._lowered.target}",
                fix="interpret the lowered program: traced.lower(...).interpret(*arrays)",
            )
        outputs = run(*_inputs(self._interface, self._version, arrays), races=races)
        return self._interface.packed_arrays(outputs)

    @property
    def asm(self) -> Mapping[str, Any]:
        """The compiler's output, by language.

        "ttir", "ttgir", "ptx", "cubin" and "sass" on a GPU, "llvm" and "s" (assembly) by LLVM, "hlo" by XLA.
        """
        return self._compiled.asm

    @property
    def resources(self) -> Resources:
        """The registers, memory and occupancy that the program takes; None for a field that the target does not report.

        GPUs report registers, spills, shared memory and occupancy; TPUs `vmem_bytes` and `planned_bytes`; the CPU
        `scratch_bytes` alone.
        """
        return self._compiled.resources

    def memory_analysis(self) -> Any:
        """XLA's account of the program's memory; `.temp_size_in_bytes` is its scratch."""
        return self._compiled.memory_analysis()


@checked
def load(path: str | PathLike[str]) -> Traced:
    """The traced kernel that `Traced.save` wrote to a file.

    It can be called, also under `jax.jit` and `jax.vmap`, interpreted, and lowered for the targets that it was saved
    for: to the same programs. Its derivatives are derived from the block IR. A kernel whose author states
    rules for them has none when it is loaded: the rules are Python functions.

    Raises:
      tilekern.errors.LoadError: it is no such file, was changed, or was saved by a newer version of tilekern.
    """
    from tilekern.kernel.file_format import decode

    return Traced(*decode(Path(path).read_text(encoding="ascii", errors="replace"), str(path)))


def _write_whole(path: Path, text: str) -> None:
    """Write a file under another name and rename it, so that no reader sees an incomplete file."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text, encoding="ascii", newline="\n")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@checked
def interpret(traced: Traced) -> Callable[..., Any]:
    """The function `traced.interpret`, see there.

    Raises:
      tilekern.errors.ArgumentError: `traced` is no traced kernel.
    """
    if isinstance(traced, Traced):  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass anything
        return traced.interpret
    raise ArgumentError(
        "tk.interpret takes a traced kernel",
        expected="what kernel.trace(x, ...) returns",
        got=describe(traced),
        fix="write tk.interpret(kernel.trace(x, y))(x, y); of a function around kernels none can be interpreted, "
        "of an op each kernel: tk.interpret(op.trace(x).kernels[0])",
    )


def _operands(interface: Interface, version: Version, arguments: tuple[Any, ...]) -> list[Any]:
    """The inputs of a program: the arrays of the arguments and of the body's closure, 4-bit arrays as bytes."""
    leaves = interface.flat(arguments)
    _check_closed(interface)
    return packed(version.inputs([*leaves, *interface.captured]))


def _inputs(interface: Interface, version: Version, arguments: tuple[Any, ...]) -> list[Any]:
    """The inputs of a program as NumPy arrays of the dtypes of its params."""
    operands = zip(_operands(interface, version, arguments), version.func.inputs, strict=True)
    return [np.asarray(x, p.ref.dtype) for x, p in operands]


def _check_closed(interface: Interface) -> None:
    if interface.captures_tracers:
        raise TargetError(
            f"{interface.name} closes over values that are being traced, and cannot be lowered by itself",
            expected="a kernel whose body closes over known values only",
            got="traced values of an enclosing jax.jit",
            fix="call the kernel inside that function, or pass the values as arguments",
        )
