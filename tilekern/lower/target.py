"""The machines that tilekern knows: records, and the names users write."""

from __future__ import annotations

from dataclasses import dataclass

from tilekern.errors import TargetError


@dataclass(frozen=True)
class Target:
    """A machine to lower for.

    Attributes:
      name: `platform:model`, e.g. "cuda:sm_90".
      platform: JAX's name of the platform: "cpu", "cuda" or "tpu".
      backend: the package below `tilekern.lower` that lowers for it.
    """

    name: str
    platform: str
    backend: str


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("cpu:xla", "cpu", "xla"),
        Target("cpu:llvm", "cpu", "llvm"),
        *(Target(f"cuda:{model}", "cuda", "triton") for model in ("sm_80", "sm_90", "sm_100")),
        *(Target(f"tpu:{model}", "tpu", "mosaic") for model in ("v5e", "v5p", "v6e", "7x")),
    )
}

# The backends that exist; a target whose backend is missing is known, and refused.
BACKENDS = ("xla",)

# Where nothing is asked for: the portable backend, which runs on every platform.
DEFAULT = TARGETS["cpu:xla"]


def resolve(name: str) -> Target:
    """The target that a user names; "cpu" is the best one for a CPU."""
    target = DEFAULT if name == "cpu" else TARGETS.get(name) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass anything
    available = ", ".join(repr(t.name) for t in TARGETS.values() if t.backend in BACKENDS)
    if target is None:
        raise TargetError(
            "there is no such target",
            expected=f"'cpu' or one of {', '.join(map(repr, TARGETS))}",
            got=f"target = {name!r}",
            fix=f"this version lowers to {available}",
        )
    if target.backend not in BACKENDS:
        raise TargetError(
            f"tilekern has no backend for {target.name} yet",
            expected=f"a target that this version lowers to: {available}",
            got=f"target = {name!r}",
            fix="leave target out: the portable backend runs on every platform of JAX",
        )
    return target
