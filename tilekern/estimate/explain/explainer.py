"""What a backend tells of its programs for explanations: `Backend.explainer` names a module of such functions."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

from tilekern.estimate.explain.explanation import Listing
from tilekern.estimate.explain.lines import Place, Shares, Words
from tilekern.estimate.result import Estimate
from tilekern.ir.core import Array, Value
from tilekern.lower.target import Target, backend_of


class Forecast(NamedTuple):
    """The estimate of a program, and where its time goes.

    Attributes:
      estimate: the estimate.
      shares: the part of each line, and of each region, of the work; empty where nothing tells.
      shares_of: what the parts are parts of, in words.
    """

    estimate: Estimate
    shares: Shares
    shares_of: str


class Explainer(Protocol):
    """The functions of the module that `Backend.explainer` names; each takes the lowering of its backend."""

    def forecast(self, lowering: Any, target: Target, values: Mapping[Value, Array]) -> Forecast:
        """The estimate, with the arrays whose values are known by their param.

        Raises:
          EstimateError: there is no estimate of this program.
        """
        ...

    def became(self, lowering: Any) -> Words:
        """By place, what the target makes of each of the user's lines."""
        ...

    def memory(self, lowering: Any) -> Mapping[str, str]:
        """The memory bill in words, by the name of a memory."""
        ...

    def programs(self, lowering: Any, numbers: Mapping[Place, int]) -> dict[str, Listing]:
        """The target's program, and its assembly where there is one, by these names.

        Args:
          lowering: the lowered kernel.
          numbers: the number of each of the user's lines, for the origins of a listing's lines.
        """
        ...


def explainer_of(target: Target) -> Explainer | None:
    """The explainer of a target's backend; None if the backend declares none."""
    name = backend_of(target).explainer
    return cast(Explainer, importlib.import_module(name)) if name else None
