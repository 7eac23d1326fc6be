"""Estimates for NVIDIA's GPUs: the cycle model on the machine code of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from tilekern.errors import EstimateError
from tilekern.estimate.data_loops import data_loops
from tilekern.estimate.gpu import Launch, LaunchEstimate
from tilekern.estimate.gpu import estimate as of_launch
from tilekern.estimate.gpu.rates import GPUS as RATES
from tilekern.estimate.gpu.rates import Gpu
from tilekern.estimate.result import Estimate
from tilekern.ir.analysis.costs import Work, work_of
from tilekern.ir.core import Array, Value
from tilekern.ir.types import DType
from tilekern.lower.resources import Resources
from tilekern.lower.triton.lowering import TritonLowering
from tilekern.lower.triton.program import Program

GPUS = {"cuda:sm_80": "A100", "cuda:sm_90": "H100", "cuda:sm_100": "B200"}
"""The GPU that stands for a target."""

_BUSY = {"tensor": "matrix", "mufu": "special", "issue": "issue", "shared": "shared"}
_PARAMETERS = {80: 0x160, 90: 0x210, 100: 0x380}
"""By compute capability the place of the first parameter in the constant bank, as the SASS of ptxas 12 reads it."""


def launch_of(lowering: TritonLowering, resources: Resources, gpu: str = "") -> Launch:
    """The launch of a compiled program.

    Args:
      lowering: the program.
      resources: what one program takes.
      gpu: name of the GPU; by default the GPU that stands for the target.

    Raises:
      EstimateError: the model knows no GPU of the target.
    """
    target = lowering.target.name
    if not gpu and target not in GPUS:
        raise EstimateError(
            f"there is no cycle model of {target}",
            expected=f"one of {', '.join(GPUS)}",
            got=f"target = {target!r}",
            fix="estimate a target of the same family, and compare candidates by it",
        )
    program, threads = lowering.program, resources.threads or 0
    operands = sum(prod(p.ref.shape) * p.ref.dtype.itemsize for p in lowering.func.inputs)
    return Launch(
        programs=program.programs * program.cluster,
        warps=threads // 32,
        resident=max(1, round((resources.occupancy or 0.0) * lowering.chip.threads_per_core / threads)),
        gpu=gpu or GPUS[target],
        nbytes=operands + sum(result.nbytes for result in program.results),
        cluster=program.cluster,
    )


def estimate(lowering: TritonLowering, values: Mapping[Value, Array]) -> Estimate:
    """The estimate of a program.

    Args:
      lowering: the program.
      values: arrays whose values are known.

    Raises:
      EstimateError: the model knows no GPU of the target, or cannot follow the machine code.
    """
    check_model(lowering)
    compiled = lowering.compile()
    return of_machine_code(lowering, values, compiled.resources, compiled.asm["sass"])[0]


def check_model(lowering: TritonLowering) -> None:
    """Refuse a target without a model, before the compiler runs."""
    launch_of(lowering, Resources(threads=32, occupancy=1.0))


def of_machine_code(
    lowering: TritonLowering, values: Mapping[Value, Array], resources: Resources, sass: str
) -> tuple[Estimate, LaunchEstimate]:
    """The estimate of a program by its machine code as text, and the forecast of its launch, see `estimate`."""
    launch = launch_of(lowering, resources)
    constants, memory = _arguments(lowering.program, [values.get(p) for p in lowering.func.inputs], RATES[launch.gpu])
    launch = replace(launch, constants=constants, memory=memory)
    forecast = _followed(lowering, sass, launch)
    return _estimate(lowering, launch, forecast, resources, work_of(lowering.func, values)), forecast


def _followed(lowering: TritonLowering, sass: str, launch: Launch) -> LaunchEstimate:
    name = lowering.program.name
    try:
        forecast = of_launch(sass, launch)
    except ValueError as error:
        raise EstimateError(
            f"the cycle model cannot follow the machine code of {name}",
            expected="branches whose conditions follow from the launch and from given arrays",
            got=str(error),
            fix="compare candidates on another target",
        ) from error
    if forecast.undecided and data_loops(lowering.func):
        raise EstimateError(
            f"the cycle model cannot tell how often loops of {name} run",
            expected="bounds that no loop computes, of values of given arrays",
            got=f"unknown values at the end of {', '.join(sorted(forecast.undecided))}",
            fix="compare candidates on another target",
        )
    return forecast


def _estimate(
    lowering: TritonLowering, launch: Launch, forecast: LaunchEstimate, resources: Resources, work: Work
) -> Estimate:
    gpu = forecast.gpu
    busy = {ours: forecast.lines[line] / forecast.cycles for line, ours in _BUSY.items()}
    busy["vector"] = max(forecast.lines["fma"], forecast.lines["alu"]) / forecast.cycles
    from_memory = min(forecast.traffic, launch.nbytes or forecast.traffic)
    busy["memory"] = from_memory / gpu.bandwidth / forecast.seconds
    busy["L2"] = forecast.traffic / gpu.l2_bandwidth / forecast.seconds
    return Estimate(
        lowering.program.name,
        lowering.target.full_name,
        gpu.name,
        forecast.seconds,
        {
            "matrix": sum(flops / gpu.peak / rate_of(dtype) for dtype, flops in work.dots.items()),
            "memory": work.cost.bytes_accessed / gpu.bandwidth,
        },
        busy,
        round(forecast.traffic),
        work.cost.bytes_accessed,
        round(forecast.flops),
        sum(work.dots.values()),
        resources.occupancy,
        launch.programs / (gpu.cores * launch.resident),
        (
            f"the clock stays at the boost clock of {gpu.ghz} GHz",
            *(f"{branch}: {assumption}" for branch, assumption in forecast.assumed.items()),
        ),
        (
            "the bytes that TMA stores",
            *(f"{operation}, {count} times in the code" for operation, count in forecast.unknown.items()),
        ),
    )


def rate_of(dtype: DType) -> float:
    """The highest rate of products of operands of a dtype, relative to bfloat16's: 2 for 8 bits, 0.5 for 32."""
    return 2.0 if dtype.itemsize == 1 else 1.0 if dtype.itemsize == 2 else 0.5


def _arguments(program: Program, values: list[Array | None], gpu: Gpu) -> tuple[dict[int, int], dict[int, bytes]]:
    """The pointers of known arrays in the constant bank, at addresses of our choice, and the contents there."""
    arrays = [*values, *program.constants]
    operands = [arrays[number] for number in program.operands] + [None for _ in program.results]
    constants: dict[int, int] = {}
    memory: dict[int, bytes] = {}
    for number, (place, array) in enumerate(zip(_places(program, _PARAMETERS[gpu.capability]), operands, strict=True)):
        if array is not None:
            address = (number + 1) << 40  # far from each other, and aligned
            constants[place], constants[place + 4] = address & 0xFFFFFFFF, address >> 32
            memory[address] = array.tobytes()
    return constants, memory


def _places(program: Program, place: int) -> Iterator[int]:
    """For each argument its place in the constant bank.

    A pointer takes 8 bytes. A descriptor takes 128, aligned to 64, then 4 for each dim of its shape, and 8 for each
    stride.
    """
    for argument in program.arguments:
        place = -(-place // (8 if argument.descriptor is None else 64)) * (8 if argument.descriptor is None else 64)
        yield place
        if argument.descriptor is None:
            place += 8
        else:
            place += 128 + 4 * len(argument.descriptor.shape)
            place = -(-place // 8) * 8 + 8 * len(argument.descriptor.strides)
