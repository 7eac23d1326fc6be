"""The estimate of a program: compile it ahead of time in another process, read the dumps, execute the scalar unit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilekern.estimate.tpu import bundles, hlo, slots
from tilekern.estimate.tpu.bundles import DumpError
from tilekern.estimate.tpu.chips import CHIPS, Chip, chip
from tilekern.estimate.tpu.evaluate import HloValue, Values, iterations
from tilekern.estimate.tpu.simulate import Run, simulate

ROOT = Path(__file__).parents[3]
_TIMEOUT = 300
_BUNDLES = "packed-bundles-post-ra"
_UTILIZATION = "pre-delay_hlo-static-per-bundle-utilization"
_ORIGINAL = "original"
_DUMPED = "|".join((_BUNDLES, "pre-delay", _ORIGINAL))
"""Labels of the passes whose text is read. The texts of all passes are 387 MB for cross-entropy, and take a third of
the compiler's time to write."""


class CompileError(Exception):
    """The compiler, or the program itself, failed; the message ends with its output."""


@dataclass(frozen=True)
class KernelEstimate:
    """The time, traffic and memory of one kernel of a program on one device.

    Attributes:
      name: the name of the HLO instruction; "asynchronous copies" for XLA's copies between HBM and VMEM, all together,
        and "data formats by SparseCores" for the arrays to which SparseCores give another layout.
      chip: a key of `CHIPS`.
      bundles: executed bundles, each of one cycle; exact.
      stall: cycles of waiting for DMAs; a model.
      read: bytes from HBM.
      written: bytes to HBM.
      dmas: the number of DMAs.
      vmem: bytes of VMEM for windows and scratch, as the compiler reports them.
      static_bundles: the length of the program, in bundles.
      use: by unit ("mxu", "valu", "eup", "xlu", "vld", "vst", "salu") the share of all cycles' slots that are filled;
        None if no dump tells it.
      fills: vector registers read back from spill slots.
      spills: vector registers written to spill slots.
      pallas: True for a `pallas_call`, False for XLA's own kernels.
    """

    name: str
    chip: str
    bundles: int
    stall: int
    read: int
    written: int
    dmas: int
    vmem: int = 0
    static_bundles: int = 0
    use: Mapping[str, float] | None = None
    fills: int = 0
    spills: int = 0
    pallas: bool = False

    @property
    def cycles(self) -> int:
        """Cycles, of bundles and of stalls."""
        return self.bundles + self.stall

    @property
    def us(self) -> float:
        """The time in microseconds."""
        return self.cycles / CHIPS[self.chip].ghz / 1e3


def call(function: str, shapes: Sequence[tuple[tuple[int, ...], str]], **static: Any) -> str:
    """The source of a program that calls a function.

    Args:
      function: "module:function".
      shapes: the arguments, as (shape, dtype).
      static: keyword arguments.
    """
    module, _, name = function.partition(":")
    return (
        "import functools, jax, jax.numpy as jnp\n"
        f"from {module} import {name} as function\n"
        f"fn = functools.partial(function, **{static!r})\n"
        f"args = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in {list(shapes)!r}]\n"
    )


def estimate(program: str, chip_name: str, keep: Path | None = None) -> list[KernelEstimate]:
    """The estimates of a program's kernels, in the order in which they run.

    Args:
      program: Python source that defines `fn`, a function, and `args`, its arguments: `jax.ShapeDtypeStruct`s, and
        NumPy arrays where scalar prefetch needs values (they become constants of the program). See `call`.
      chip_name: a key of `CHIPS`.
      keep: a folder for the compiler's dumps, which are deleted otherwise.

    Raises:
      CompileError: the program does not compile.
      SimulationError: control depends on values that are not known.
      DumpError: the dumps have another form than this module knows.
    """
    machine = chip(chip_name)
    if keep is not None:
        compile_into(keep, program, chip_name)
        return read(keep, chip_name, machine)
    with tempfile.TemporaryDirectory(prefix="tpu-static-") as folder:
        compile_into(Path(folder), program, chip_name, passes=_DUMPED)
        return read(Path(folder), chip_name, machine)


def compile_into(folder: Path, program: str, chip_name: str, passes: str = "") -> None:
    """Compile in a child process; libtpu writes its dumps into the folder, of passes whose label has `passes` in it.

    `passes` is a regular expression.
    """
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true"
    flags += f" --xla_jf_dump_llo_pass_label_regex=.*({passes}).*"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        # Without these libtpu asks the cloud's metadata server which machine it is on.
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip(),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-m", "tilekern.estimate.tpu.child", chip_name, str(folder)]
    try:
        done = subprocess.run(command, input=program, env=environment, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise CompileError(f"the compiler took more than {_TIMEOUT} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)), "")
        raise CompileError(f"{said or 'the child process failed'}\n" + "\n".join(lines[-12:]))


def read(folder: Path, chip_name: str, machine: Chip) -> list[KernelEstimate]:
    """The estimates of a program's kernels, from the folder of its dumps."""
    files = [*folder.glob("*-TLP-hlo.txt")]
    if len(files) != 1:
        raise DumpError(f"expected one *-TLP-hlo.txt in {folder}, found {len(files)}")
    text = files[0].read_text()
    vmem = hlo.vmem((folder / "compiled.txt").read_text())
    return _Dumps(folder, chip_name, machine, text, vmem).kernels(hlo.entry(text))


@dataclass(frozen=True)
class _Dumps:
    """The dumps of a program: their folder, the chip, the text of the HLO, and the bytes of VMEM by kernel."""

    folder: Path
    chip_name: str
    machine: Chip
    text: str
    vmem: Mapping[str, int]

    def kernels(
        self, instructions: Mapping[str, hlo.HloInstruction], arguments: Sequence[HloValue | None] = ()
    ) -> list[KernelEstimate]:
        """The estimates of copies that run beside a computation's kernels, then of the kernels in order.

        `arguments` are the values of the computation's arguments.
        """
        values = Values(instructions, self.text, arguments=arguments)
        if control := [i.name for i in instructions.values() if i.opcode in hlo.CONTROL]:
            raise DumpError(f"XLA's own control flow ({', '.join(control)}): how often its kernels run is not known")
        kernels: list[KernelEstimate] = []
        for instruction in instructions.values():
            runs_beside = instruction.opcode in (*hlo.COPIES, *hlo.DONE) or instruction.name.startswith(hlo.FORMATS)
            if runs_beside or instruction.opcode in hlo.FREE or hlo.is_scalar(instruction):
                continue
            if instruction.opcode == hlo.LOOP:
                state = values.of(instruction.operands[0])
                trips = iterations(instruction, state, self.text)
                body = hlo.called(instruction, "body", self.text)
                kernels += [_repeated(kernel, trips) for kernel in self.kernels(body, [state])]
            else:
                kernels.append(self.kernel(instruction, instructions, values))
        formats = _formats(instructions, self.chip_name, self.machine)
        overlapped = (_copies(instructions, self.chip_name, self.machine), formats)
        return [*(kernel for kernel in overlapped if kernel.dmas), *kernels]

    def kernel(
        self, instruction: hlo.HloInstruction, instructions: Mapping[str, hlo.HloInstruction], values: Values
    ) -> KernelEstimate:
        """The estimate of one kernel."""
        operands = {k: values.words(name) for k, name in enumerate(instruction.operands)}
        prefetched = {k: words for k, words in operands.items() if words is not None}
        if instruction.opcode.endswith("-start") or instruction.opcode.startswith("async"):
            raise DumpError(f"{instruction.name}: an asynchronous call, of which no dump tells the time")
        compiled = [instruction.name, *hlo.twins(instruction.name, instructions, self.text)]
        name = next((n for n in compiled if _dumps(self.folder, n, _BUNDLES)), instruction.name)
        timed, stored = _kernel(self.folder, name, prefetched, self.chip_name, self.machine)
        values.store(instruction, stored)
        vmem, pallas = self.vmem.get(instruction.name, 0), instruction.opcode == hlo.PALLAS
        return replace(timed, name=instruction.name, vmem=vmem, pallas=pallas)


def _repeated(kernel: KernelEstimate, trips: int) -> KernelEstimate:
    """A kernel of a loop's body in all iterations: every one takes as long as the first."""
    counted = ("bundles", "stall", "read", "written", "dmas", "fills", "spills")
    return replace(kernel, name=f"{kernel.name} ×{trips}", **{key: getattr(kernel, key) * trips for key in counted})


def _kernel(
    folder: Path, name: str, operands: Mapping[int, list[int]], chip_name: str, machine: Chip
) -> tuple[KernelEstimate, Mapping[int, Sequence[int]]]:
    """One kernel, and the words that it stores, by operand; the cores of a chip that share the grid run at once."""
    program = bundles.parse(_dump(folder, name, _BUNDLES).read_text())
    table = slots.parse(_dump(folder, name, _UTILIZATION).read_text())
    original = _dumps(folder, name, _ORIGINAL)[0].read_text()  # XLA makes some fusions in several attempts
    index = re.search(r"(#allocation\d+) \[.*- core index'\]", original)
    runs = [
        simulate(program, machine, operands, {index[1]: core} if index else {})
        for core in range(machine.cores if index else 1)
    ]
    slowest = max(runs, key=lambda run: run.bundles + run.stall)
    summary = _summary(name, chip_name, slowest, table, machine)
    read_, written, dmas = (sum(getattr(run, key) for run in runs) for key in ("read", "written", "dmas"))
    return replace(summary, read=read_, written=written, dmas=dmas, static_bundles=len(program)), runs[0].stored


def _summary(name: str, chip_name: str, run: Run, table: slots.Slots, machine: Chip) -> KernelEstimate:
    used = table.used(run.executed)
    cycles = max(run.bundles + run.stall, 1)

    def share(unit: str, capacity: int | None = None) -> float:
        return used[unit] / cycles / (capacity or table.capacity[unit])

    use = {
        "mxu": share("MATMUL", machine.mxus),
        "valu": share("VALU"),
        "eup": share("EUP"),
        "xlu": share("XLU"),
        "vld": share("VLOAD"),
        "vst": share("VSTORE"),
        "salu": share("SALU"),
    }
    return KernelEstimate(
        name,
        chip_name,
        run.bundles,
        run.stall,
        run.read,
        run.written,
        run.dmas,
        use=use,
        fills=used["VLOAD:FILL"],
        spills=used["VSTORE:SPILL"],
    )


def _copies(instructions: Mapping[str, hlo.HloInstruction], chip_name: str, machine: Chip) -> KernelEstimate:
    """The estimate of XLA's asynchronous copies, as one kernel that overlaps with no other."""
    copies = [i for i in instructions.values() if i.opcode in hlo.COPIES]
    sizes = {True: 0, False: 0}  # True for copies into VMEM
    for size, into in map(hlo.copied, copies):
        sizes[into] += size
    stall = int(machine.latency + sum(sizes.values()) / machine.bytes_per_cycle) if copies else 0
    return KernelEstimate("asynchronous copies", chip_name, 0, stall, sizes[True], sizes[False], len(copies))


def _formats(instructions: Mapping[str, hlo.HloInstruction], chip_name: str, machine: Chip) -> KernelEstimate:
    """The estimate of SparseCores' layout changes, as one kernel.

    No dump tells their time: it is the least that HBM needs for one after the other.
    """
    sizes = hlo.reformatted(instructions)
    stall = int(len(sizes) * machine.latency + 2 * sum(sizes) / machine.bytes_per_cycle)
    return KernelEstimate("data formats by SparseCores", chip_name, 0, stall, sum(sizes), sum(sizes), len(sizes))


def _dump(folder: Path, name: str, stage: str) -> Path:
    """The dump of a stage of one kernel."""
    paths = _dumps(folder, name, stage)
    if len(paths) != 1:
        raise DumpError(f"expected one dump {stage!r} of {name!r}, found {len(paths)}: XLA runs it in another way")
    return paths[0]


def _dumps(folder: Path, name: str, stage: str) -> list[Path]:
    pattern = re.compile(rf"\d+-{re.escape(name)}-\d+-{stage}\.txt")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
