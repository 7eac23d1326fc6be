"""A call of a declared kernel or op on arguments of given types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilekern import _jax
from tilekern.kernel.choice import Tunable
from tilekern.kernel.definition import Definition, Rules
from tilekern.kernel.results import Results
from tilekern.kernel.signature import Signature
from tilekern.lower.target import Target


@dataclass(frozen=True, eq=False)
class DeclaredCall:
    """A call on arguments of given types.

    Attributes:
      definition: the definition of the kernel or op.
      arguments: the inputs as pytrees of `jax.ShapeDtypeStruct`.
      statics: the static arguments.
      blocks: the blocks, choices and launch options that the call gives.
      asked: the target that the call names; None if it names none.
      results: the types of the results.
      settings: the settings of JAX under which the body and the rules are traced.
    """

    definition: Definition
    arguments: tuple[Any, ...]
    statics: Mapping[str, Any]
    blocks: Mapping[str, Tunable]
    asked: Target | None
    results: Results
    settings: _jax.Settings

    @property
    def name(self) -> str:
        """The name of the kernel or op."""
        return self.definition.signature.name

    @property
    def signature(self) -> Signature:
        """The parameters of the kernel or op."""
        return self.definition.signature

    @property
    def rules(self) -> Rules:
        """The rules for derivatives."""
        return self.definition.rules

    @property
    def keywords(self) -> dict[str, Any]:
        """Static arguments, then blocks, choices and launch options, as the call gives them."""
        return {**self.statics, **self.blocks}

    def blocks_for(self, target: Target) -> dict[str, Tunable]:
        """Blocks, choices and launch options on a target."""
        return self.definition.blocks_for(target, self.arguments, self.statics, self.blocks)

    def again(self, *args: Any) -> Any:
        """The results of the same call on inputs of any types: with its static arguments, blocks and target."""
        target = {} if self.asked is None else {"target": self.asked.asked_as}
        return self.rules.callee()(*args, **self.keywords, **target)
