"""The explanation of a lowered kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilekern.errors import EstimateError
from tilekern.estimate import by_target
from tilekern.estimate.data_loops import check_given, given_values
from tilekern.estimate.explain import listings, on_cpu, on_gpu, on_tpu, work
from tilekern.estimate.explain.changes import Trials, Variants, try_changes
from tilekern.estimate.explain.explanation import Explanation, LineReport, Listing
from tilekern.estimate.explain.lines import Place, Shares, Words, accesses, ordered, source_of
from tilekern.estimate.explain.tiles import tiles
from tilekern.estimate.result import Estimate
from tilekern.ir.core import Array, Value
from tilekern.lower.llvm.lowering import LlvmLowering
from tilekern.lower.lowering import Lowering
from tilekern.lower.mosaic.lowering import MosaicLowering
from tilekern.lower.target import Target
from tilekern.lower.triton.compile import toolchain
from tilekern.lower.triton.lowering import TritonLowering


def explain(
    lowering: Lowering,
    target: Target,
    known: Sequence[Array | None],
    extents: Mapping[str, object],
    variants: Variants | None = None,
    budget: float = 0.0,
) -> Explanation:
    """An `Explanation` of a lowered kernel: code and time of each line, the estimate, and changes that would help.

    Args:
      lowering: the lowered kernel.
      target: the target that it is lowered for.
      known: for each input of its Func the array, None where its values are not known.
      extents: by the name of an input its values, or the number that all of its elements have.
      variants: the kernel with other blocks and launch options; None for a kernel without any.
      budget: seconds for trials of such changes; a trial that has begun is finished.

    Raises:
      ArgumentError: the Func has no such input, or the values do not fit it.
      EstimateError: it is lowered to the portable backend, whose program is XLA's to explain.
    """
    if not isinstance(lowering, TritonLowering | MosaicLowering | LlvmLowering):
        raise by_target.no_model(lowering, target)
    func = lowering.func
    values = given_values(func, {p: x for p, x in zip(func.inputs, known, strict=True) if x is not None}, extents)
    try:
        check_given(func, values)
        reason, (forecast, shares, shares_of) = "", _estimate(lowering, target, values)
    except EstimateError as error:
        forecast, reason, shares, shares_of = None, error.summary, Shares({}, {}), ""
    trials = Trials((), 0, {})
    if forecast is not None and variants is not None and budget > 0:
        trials = try_changes(
            variants, forecast, lambda variant: by_target.estimate(variant, target, known, extents), budget
        )
    said = _merged(accesses(func, masks=not isinstance(lowering, TritonLowering)), _became(lowering))
    places = ordered([*said, *shares.lines])
    return Explanation(
        func.name,
        target.full_name,
        forecast,
        reason,
        tuple(
            LineReport(*place, source_of(place), tuple(said.get(place, ())), shares.lines.get(place))
            for place in places
        ),
        shares_of,
        _memory(lowering),
        trials.changes,
        trials.tried,
        trials.refused,
        variants.settings if variants is not None else {},
        _listings(lowering, {place: number for number, place in enumerate(places)}),
        tiles(func),
        shares.regions,
    )


def _listings(
    lowering: TritonLowering | MosaicLowering | LlvmLowering, numbers: Mapping[Place, int]
) -> dict[str, Listing]:
    """The block IR, the program, and the assembly of a GPU or a CPU."""
    ir = {"block IR": listings.of_ir(lowering.func, numbers)}
    match lowering:
        case TritonLowering():
            cubin = lowering.compile().asm.get("cubin")
            sass = toolchain.disassemble(cubin, lines=True) if cubin else ""
            program, assembly = listings.of_triton(lowering, numbers), listings.of_sass(lowering, sass, numbers)
        case MosaicLowering():
            return ir | {"program": listings.plain(lowering.text)}
        case LlvmLowering():
            program, assembly = listings.plain(lowering.text), listings.plain(lowering.compile().asm["s"])
    return ir | {"program": program, "assembly": assembly}


def _merged(first: Words, second: Words) -> Words:
    for place, said in second.items():
        first[place].update(said)
    return first


def _estimate(
    lowering: TritonLowering | MosaicLowering | LlvmLowering, target: Target, values: Mapping[Value, Array]
) -> tuple[Estimate, Shares, str]:
    """The estimate, the amounts of lines and regions, and a sentence that names the amount."""
    match lowering:
        case TritonLowering():
            return *on_gpu.estimate(lowering, values), on_gpu.SHARES_OF
        case MosaicLowering():
            rates = on_tpu.rates(lowering)
        case LlvmLowering():
            rates = on_cpu.rates(lowering)
    parts = work.shares_of_lines(lowering.func, values, rates)
    return by_target.of_values(lowering, target, values), parts, work.SHARES_OF


def _became(lowering: TritonLowering | MosaicLowering | LlvmLowering) -> Words:
    match lowering:
        case TritonLowering():
            return on_gpu.became(lowering)
        case MosaicLowering():
            return on_tpu.became(lowering)
        case LlvmLowering():
            return on_cpu.became(lowering)


def _memory(lowering: TritonLowering | MosaicLowering | LlvmLowering) -> Mapping[str, str]:
    match lowering:
        case TritonLowering():
            return on_gpu.memory(lowering)
        case MosaicLowering():
            return on_tpu.memory(lowering)
        case LlvmLowering():
            return on_cpu.memory(lowering)
