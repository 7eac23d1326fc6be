"""A backend, as one record: all that the rest of tilekern knows of it, and what it must give.

`tilekern.lower.target` has the records of all backends. A record is light: its functions import the backend's modules
when they are called.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import jax

from tilekern import _machine
from tilekern.ir.core import Array, Func
from tilekern.ir.records import record
from tilekern.lower.partitioning import Partitioning
from tilekern.lower.resources import Resources
from tilekern.lower.rewrite.capabilities import Capabilities
from tilekern.passes.pipeline import Pass, Rounds

OPEN = "auto"
"""The emitter of a target that leaves the choice of its emitter to tilekern."""


@record
class Target:
    """A machine to lower for.

    Attributes:
      name: `platform:model`, e.g. "cuda:sm_90".
      platform: JAX's name of the platform: "cpu", "cuda", "rocm", "tpu" or that of a plugin.
      backend: the name of the backend that lowers for it.
      portable: True if the code must run on later models, too.
      fallback: the calls whose kernels the portable backend takes if `backend` refuses them, with a warning: "never";
        "unnamed": calls that name no target; "always": also calls that name this target, as "cpu".
      like: the target whose schedules stand in where a kernel has none for this target, "" for none.
      emitters: the names of emitters that a call may add to the target's name, "cuda:sm_90+gluon"; the first one is the
        usual one, which has no name in `emitter`. Empty if the backend has only one way to emit.
      emitter: the emitter, if it is not the usual one. "gluon": warp-specialised programs in Gluon; "auto": Gluon where
        a kernel has such a form and it is worth it, else Triton.
    """

    name: str
    platform: str
    backend: str
    portable: bool = False
    fallback: Literal["never", "unnamed", "always"] = "never"
    like: str = ""
    emitters: tuple[str, ...] = ()
    emitter: str = ""

    @property
    def asked_as(self) -> str:
        """The name to ask for it: "cpu" for the best target of this CPU, which always falls back."""
        return self.platform if self.fallback == "always" else self.full_name

    @property
    def full_name(self) -> str:
        """The name, with the emitter."""
        return self.name + (f"+{self.emitter}" if self.emitter else "")


@record
class Device:
    """A machine to choose blocks for; get it by `tk.device`, or as the parameter `device` of a schedule.

    0 stands for a number that the machine does not have, or that is not known.

    Attributes:
      target: its name, "cuda:sm_90".
      platform: JAX's name of the platform: "cpu", "cuda", "rocm" or "tpu".
      cores: multiprocessors of a GPU, or TensorCores of one device of JAX on a TPU.
      fast_memory: bytes that one program may take, of shared memory on a GPU, of vector memory on a TPU.
      registers: 32-bit registers of a multiprocessor of a GPU.
      lanes: threads of a warp on a GPU, elements of a row of a vector register on a TPU.
      sublanes: rows of a vector register of a TPU, each of `lanes` elements of 32 bits.
      matrix_size: rows and columns of a matrix unit of a TPU.
      gpu: the GPU of the target that `cores`, `bandwidth` and `flops` are of, "H100 SXM"; "" on other platforms.
      matrix_unit: the instruction by which a GPU multiplies matrices: "mma", "wgmma" or "tcgen05", "mfma" on AMD's; ""
        elsewhere. "mma" and "mfma" take their operands from registers, the others from shared memory.
      bandwidth: bytes a second that the memory of a GPU, or the HBM of one TensorCore, delivers at most.
      flops: multiplications and additions of bfloat16 matrices that a GPU, or one TensorCore, does in a second at most.
      emitter: "gluon" if a program's blocks are for one warpgroup of a warp-specialised GPU program, which shares its
        loads with others; "triton" for other GPU programs, "" elsewhere.
      cluster: thread blocks that may compute a program together, `num_ctas`: 2 for the emitter "gluon" if the installed
        Triton has multicast for it, 1 otherwise.

    Example:
      >>> import tilekern as tk
      >>> tk.device("cuda:sm_90").cores
      132
    """

    target: str
    platform: str
    cores: int = 0
    fast_memory: int = 0
    registers: int = 0
    lanes: int = 0
    sublanes: int = 0
    matrix_size: int = 0
    gpu: str = ""
    matrix_unit: str = ""
    bandwidth: float = 0
    flops: float = 0
    emitter: str = ""
    cluster: int = 1


class Lowering(Protocol):
    """A lowered Func.

    Attributes:
      partitioning: the treatment of its calls by XLA's partitioner.
    """

    partitioning: ClassVar[Partitioning]

    @property
    def text(self) -> str:
        """The target's program, for people to read."""
        ...

    @property
    def plan(self) -> str:
        """The plan of the program, in words: loops, tiles, copies."""
        ...

    def run(self, *inputs: jax.Array) -> Sequence[jax.Array]:
        """The outputs; traceable by JAX, when it lowers for the target's platform."""
        ...

    def interpret(self, *inputs: Array) -> Sequence[Array]:
        """The outputs, computed on this machine without the target's hardware."""
        ...

    def compile(self) -> CompiledProgram:
        """Compile for the target; this machine need not have its hardware."""
        ...


class CompiledProgram(Protocol):
    """A compiled Func."""

    @property
    def asm(self) -> Mapping[str, Any]:
        """The stages of the compilation, by the name of the language."""
        ...

    @property
    def resources(self) -> Resources:
        """The resources of the machine that the program takes."""
        ...

    def __call__(self, *inputs: Any) -> Sequence[jax.Array]:
        """Run it here."""
        ...

    def memory_analysis(self) -> Any:
        """XLA's account of the program's memory."""
        ...


@record
class FuzzMode:
    """A way in which the fuzzer runs random programs on a backend.

    Attributes:
      name: of `python -m tilekern fuzz --targets`: a target, and behind a space the words that tell its modes apart.
      programs: the programs: "plain"; "all", which also mask by ranges and reduce by further monoids; "debug", which
        print and assert; "index vectors", which compute indices in chains; "products", which are matrix products.
      narrow: True for programs without dtypes of 64 bits.
      optimize: True if the programs go through the passes of all targets first.
      x64: True to run with 64 bits in JAX.
      in_one_op: True for kernels called by one op, each twice, in place of programs that are run by themselves.
      every_target: True to lower each program for some target of the backend, else for the representative one.
      batch: programs that run at once.
      lacks: a part of the summary of the one `TargetError` by which interpreted programs may be refused.
      machine_code: names of targets, for one of which each program is compiled; its machine code is interpreted. Empty
        for programs that are not compiled first.
      outputs: the outputs of a Func, from its inputs and a seed; None for the outputs of the backend's lowering.
    """

    name: str
    programs: Literal["plain", "all", "debug", "index vectors", "products"] = "all"
    narrow: bool = False
    optimize: bool = True
    x64: bool = True
    in_one_op: bool = False
    every_target: bool = False
    batch: int = 30
    lacks: str = ""
    machine_code: tuple[str, ...] = ()
    outputs: Callable[[Func, Sequence[Array], int], Sequence[Array]] | None = None


def _serves_no_platform(platform: str, exporting: bool) -> Target | None:
    """None: calls that name no target go to other backends."""
    return None


def _on_this_machine(target: Target) -> bool:
    """True: the target is any machine."""
    return True


def _runs_anywhere(target: Target, name: str) -> None:
    """Raise nothing: every machine of the platform runs the code."""


def _device_kind(target: Target) -> str:
    """JAX's name of the device of the target's platform."""
    return _machine.device_kind(target.platform)


def _unknown_device(target: Target) -> Device:
    """A record without numbers."""
    return Device(target.name, target.platform)


@record
class Backend:
    """A backend. Only the first three fields are needed.

    Attributes:
      name: the name; of a backend of tilekern also its folder in `tilekern/lower/`.
      targets: the targets that it lowers for.
      lower: lowers a Func that went through the passes of all targets, for a target, with launch options that somebody
        chose. It raises a `TilekernError` for a Func that it refuses.
      specialize: the same for a target's emitter "gluon"; None if the Func has no such form, or it is not worth it. The
        last argument is True for all Funcs of such a form, worth it or not.
      detect: the target of this machine for calls that name none, from a platform, and True if the program is exported,
        so that its code must run elsewhere; None if the backend does not serve such calls. It raises a `TargetError` if
        the machine is too old.
      is_here: True for a target that this machine has, if `package` is installed.
      check_runs_here: raises a `TargetError` if this machine has devices of the target's platform, none of which runs
        its code; the second argument is the kernel's name.
      device: the record of a target for schedules.
      machine: names this machine, which has the target, so that blocks that were tuned for another one do not serve it.
      passes: the passes of a target, in their order, for the documentation.
      capabilities: the dtypes that its targets compute with, if `tilekern.lower.rewrite` legalises them.
      simulated: a function of JAX that computes on this machine's CPU what a lowering computes, so that many programs
        are compiled as one; None if there is only `Lowering.interpret`.
      representative: the target that stands for the backend in checks and tables; by default the first one.
      hardware: what a target is, "GPU".
      package: the package that it compiles with, which may be missing.
      interprets_without: True if programs are interpreted also without `package`.
      install: the command that installs what it needs.
      process_bound: why its code runs in this process only, so that it cannot be exported; "" if it can be.
      custom_call: the name of the custom call that exported programs hold, for which `jax.export` asks consent.
      estimator: the name of a module with `estimate(lowering, values)`, which returns the `Estimate` of a program;
        `values` are arrays by their param of `lowering.func`, where they are known. It is imported for an estimate, for
        models stand in a layer above. "" if there is no model.
      explainer: the name of a module for `explain`, with the functions of `estimate.explain.explainer.Explainer`. It is
        imported for an explanation, as `estimator`. "" if programs are not explained.
      takes_extents: True if a tile may be as long as its axis, whatever the length; the model of blocks then tries that
        size, too. False for targets whose tiles have sizes that are powers of two.
      reads_four_bits: True if programs read an array of 4-bit numbers as XLA holds it, where its rows are whole bytes.
      fuzz: the modes of the fuzzer; by default the plain programs on the representative target.
    """

    name: str
    targets: tuple[Target, ...]
    lower: Callable[[Func, Target, Mapping[str, int]], Lowering]
    specialize: Callable[[Func, Target, Mapping[str, int], bool], Lowering | None] | None = None
    detect: Callable[[str, bool], Target | None] = _serves_no_platform
    is_here: Callable[[Target], bool] = _on_this_machine
    check_runs_here: Callable[[Target, str], None] = _runs_anywhere
    device: Callable[[Target], Device] = _unknown_device
    machine: Callable[[Target], str] = _device_kind
    passes: Callable[[Target], Sequence[Pass | Rounds]] | None = None
    capabilities: Callable[[], Capabilities] | None = None
    simulated: Callable[[Any], Callable[..., Sequence[jax.Array]]] | None = None
    representative: str = ""
    hardware: str = "CPU"
    package: str = ""
    interprets_without: bool = False
    install: str = ""
    process_bound: str = ""
    custom_call: str = ""
    estimator: str = ""
    explainer: str = ""
    takes_extents: bool = False
    reads_four_bits: bool = False
    fuzz: tuple[FuzzMode, ...] = ()

    @property
    def checked(self) -> Target:
        """The target that stands for the backend in checks and tables."""
        return next((t for t in self.targets if t.name == self.representative), self.targets[0])

    @property
    def fuzz_modes(self) -> tuple[FuzzMode, ...]:
        """The modes of the fuzzer, at least one."""
        return self.fuzz or (FuzzMode(self.checked.name, "plain"),)

    @property
    def compiles(self) -> bool:
        """True if the package that it compiles with is installed."""
        return not self.package or importlib.util.find_spec(self.package) is not None

    @property
    def interprets(self) -> bool:
        """True if its programs run on this machine without the target's hardware."""
        return self.interprets_without or self.compiles
