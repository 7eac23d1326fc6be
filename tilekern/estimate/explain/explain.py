"""The explanation of a lowered kernel."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from tilekern.errors import ArgumentError, EstimateError
from tilekern.estimate import by_target
from tilekern.estimate.data_loops import check_given, given_values
from tilekern.estimate.explain import listings
from tilekern.estimate.explain.changes import Trials, Variants, default_budget, try_changes
from tilekern.estimate.explain.explainer import explainer_of
from tilekern.estimate.explain.explanation import Explanation, LineReport
from tilekern.estimate.explain.lines import Shares, ordered, source_of
from tilekern.estimate.explain.tiles import tiles
from tilekern.ir.core import Array, Func
from tilekern.lower.lowering import Lowering
from tilekern.lower.target import Target


def explain(
    lowering: Lowering,
    target: Target,
    known: Sequence[Array | None],
    extents: Mapping[str, object],
    variants: Variants | None = None,
    budget: float | None = 0.0,
) -> Explanation:
    """An `Explanation` of a lowered kernel: code and time of each line, the estimate, and changes that would help.

    Args:
      lowering: the lowered kernel.
      target: the target that it is lowered for.
      known: for each input of its Func the array, None where its values are not known.
      extents: by the name of an input its values, or the number that all of its elements have.
      variants: the kernel with other blocks and launch options; None for a kernel without any.
      budget: seconds for trials of such changes; a trial that has begun is finished. None for `default_budget`.

    Raises:
      ArgumentError: the Func has no such input, the values do not fit it, or the budget is no number of seconds from 0.
      EstimateError: the backend declares no explainer: the program of the portable one is XLA's to explain.
    """
    _check_budget(budget)
    explainer = explainer_of(target)
    if explainer is None:
        raise by_target.no_model(lowering, target)
    func = cast(Func, cast(Any, lowering).func)
    begin = time.monotonic()
    values = given_values(func, {p: x for p, x in zip(func.inputs, known, strict=True) if x is not None}, extents)
    try:
        check_given(func, values)
        reason, (forecast, shares, shares_of) = "", explainer.forecast(lowering, target, values)
    except EstimateError as error:
        forecast, reason, shares, shares_of = None, error.summary, Shares({}, {}), ""
    trials = Trials()
    if forecast is not None and variants is not None and budget != 0:
        seconds = default_budget(target, time.monotonic() - begin) if budget is None else budget
        trials = try_changes(
            variants, forecast, lambda variant: by_target.estimate(variant, target, known, extents), seconds
        )
    said = explainer.became(lowering)
    places = ordered([*said, *shares.lines])
    numbers = {place: number for number, place in enumerate(places)}
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
        explainer.memory(lowering),
        trials.changes,
        trials.tried,
        trials.refused,
        variants.settings if variants is not None else {},
        lambda: {"block IR": listings.of_ir(func, numbers), **explainer.programs(lowering, numbers)},
        tiles(func),
        shares.regions,
        trials.untried,
    )


def _check_budget(budget: object) -> None:
    if not (budget is None or (isinstance(budget, int | float) and budget >= 0)):
        raise ArgumentError(
            "changes cannot be tried for this time",
            expected="a budget of 0 seconds or more",
            got=f"budget = {budget!r}",
            fix="leave it out for the usual time, or say 0 to try no changes",
        )
