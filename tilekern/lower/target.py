"""The machines that tilekern lowers for: their records, and the names that users write."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

from tilekern import _machine
from tilekern.errors import TargetError


@dataclass(frozen=True)
class Target:
    """A machine to lower for.

    Attributes:
      name: `platform:model`, e.g. "cuda:sm_90".
      platform: JAX's name of the platform: "cpu", "cuda", "rocm" or "tpu".
      backend: the package of `tilekern.lower` that lowers for it.
      portable: True if the code must run on later models, too.
      has_fallback: True if the portable backend takes kernels that `backend` refuses, in calls that name no target.
      falls_back: True if the portable backend takes them also in calls that name this target, as "cpu".
      like: the target whose schedules stand in where a kernel has none for this target, "" for none.
      emitter: "gluon" for warp-specialised programs in Gluon; "auto" for Gluon where a kernel has such a form and it
        is worth it, else Triton; "" for the backend's usual emitter.
    """

    name: str
    platform: str
    backend: str
    portable: bool = False
    has_fallback: bool = False
    falls_back: bool = False
    like: str = ""
    emitter: str = ""

    @property
    def asked_as(self) -> str:
        """The name to ask for it: "cpu" for a target that falls back."""
        return self.platform if self.falls_back else self.full_name

    @property
    def full_name(self) -> str:
        """The name, with the emitter."""
        return self.name + (f"+{self.emitter}" if self.emitter else "")


NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
AMD = ("gfx942", "gfx950")

TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("cpu:xla", "cpu", "xla"),
        Target("cpu:llvm", "cpu", "llvm", has_fallback=True),
        *(Target(f"cuda:{model}", "cuda", "triton") for model in NVIDIA),
        *(Target(f"rocm:{model}", "rocm", "triton", like="cuda:sm_80") for model in AMD),
        *(Target(f"tpu:{model}", "tpu", "mosaic", has_fallback=True) for model in ("v5e", "v5p", "v6e", "7x")),
    )
}

# JAX's names of TPUs, as in its `tpu_info`.
_TPUS = {
    "TPU v5 lite": "tpu:v5e",
    "TPU v5e": "tpu:v5e",
    "TPU v5": "tpu:v5p",
    "TPU v5p": "tpu:v5p",
    "TPU v6 lite": "tpu:v6e",
    "TPU v6e": "tpu:v6e",
    "TPU7x": "tpu:7x",
}

# The portable backend: it runs on every platform of JAX.
DEFAULT = TARGETS["cpu:xla"]


def on_platform(platform: str, asked: Target | None, exporting: bool = False) -> Target:
    """The target of a call that JAX lowers for a platform.

    Args:
      platform: "cpu", "cuda", "rocm", "tpu" or any other.
      asked: the target that the call names, if any. The portable backend runs on every platform.
      exporting: True if the program runs in another process, perhaps on another machine: then code is portable.

    Raises:
      TargetError: the named target does not fit the platform or the export, or there is no code for this GPU.
    """
    if asked is None:
        here = {"cuda": _gpu_here, "tpu": _tpu_here, "cpu": _cpu_here}
        return here[platform](exporting) if platform in here else DEFAULT
    if asked.falls_back and (exporting or asked.platform != platform):
        return DEFAULT
    if exporting and asked.backend == "llvm":
        raise TargetError(
            f"a call with target={asked.name!r} cannot be exported",
            expected="a program that another process can run",
            got="machine code of this process",
            fix="leave target out: then exported programs have portable code for CPUs",
        )
    if asked.backend == DEFAULT.backend or asked.platform == platform:
        return asked
    raise TargetError(
        f"a call with target={asked.name!r} is lowered for another platform",
        expected=f"a program for {asked.platform}",
        got=f"platform = {platform!r}",
        fix=f"leave target out, or lower for {asked.platform!r} only: lower(lowering_platforms=({asked.platform!r},))",
    )


def check_runs_here(target: Target, name: str) -> None:
    """Refuse machine code that no GPU of this machine runs; a machine without GPUs may compile for all.

    Args:
      target: the target of the code.
      name: of the kernel.

    Raises:
      TargetError: this machine has GPUs of the target's platform, all of other models.
    """
    here = _models_here(target.platform)
    if target.portable or not here or any(_runs_on(target, model) for model in here):
        return
    raise TargetError(
        f"{name} is compiled for another GPU than that of this machine",
        expected=f"a GPU that runs the code of {target.name}",
        got=f"a GPU of {', '.join(f'{target.platform}:{model}' for model in here)}",
        fix="leave target out, or name 'cpu:xla', the portable backend; to run it elsewhere, export it with jax.export",
    )


def _models_here(platform: str) -> list[str]:
    """The models of this machine's GPUs, as targets name them."""
    if platform == "cuda":
        return [f"sm_{capability}" for capability in sorted(_machine.compute_capabilities())]
    architecture = _machine.amd_architecture() if platform == "rocm" else None
    return [] if architecture is None else [architecture]


def _runs_on(target: Target, model: str) -> bool:
    """True if a model runs the machine code of a target.

    Code of sm_80 to sm_89 runs on later models of the same major number (CUDA C++ Programming Guide, "Binary
    Compatibility"). Triton compiles newer ones for sm_90a, sm_100a and so on, whose code runs on that model only.
    """
    mine = target.name.partition(":")[2]
    if target.platform != "cuda" or int(mine[3:]) >= 90:
        return mine == model
    return mine[3:-1] == model[3:-1] and int(mine[3:]) <= int(model[3:])


def _gpu_here(exporting: bool) -> Target:
    """The target for this machine's GPU; code for any GPU if there is none, or if its model is unknown."""
    capability = None if exporting else _machine.compute_capability()
    if capability is None:
        return replace(TARGETS["cuda:sm_80"], portable=True)
    if capability < 80:
        raise TargetError(
            "tilekern has no code for this GPU",
            expected="compute capability 8.0 or newer",
            got=f"compute capability {capability // 10}.{capability % 10}",
            fix='call with target="cpu:xla": the portable backend runs on every GPU of JAX',
        )
    return TARGETS.get(f"cuda:sm_{capability}") or replace(TARGETS["cuda:sm_80"], portable=True)


def _tpu_here(exporting: bool) -> Target:
    """The target for this machine's TPU: code for all four models if it has none, portable code for others."""
    kind = None if exporting else _machine.tpu_kind()
    if kind is None:
        return replace(TARGETS["tpu:v5e"], portable=True)
    return TARGETS[_TPUS[kind]] if kind in _TPUS else DEFAULT


def _cpu_here(exporting: bool = False) -> Target:
    """Code by LLVM for this CPU if llvmlite is installed; exported programs have portable code."""
    return DEFAULT if exporting or find_spec("llvmlite") is None else TARGETS["cpu:llvm"]


EMITTERS = ("triton", "gluon", "auto")
"""Emitters of the Triton backend that a call may name: `target="cuda:sm_90+gluon"`, `lower(..., emitter="gluon")`."""

WARP_SPECIALIZED = ("cuda:sm_90",)
"""Targets that "gluon" and "auto" emit for."""


def resolve(name: str, emitter: str | None = None) -> Target:
    """The target of a name that a user writes; "cpu" is the fastest target for this CPU.

    Args:
      name: the target; an emitter may stand behind it, after a "+".
      emitter: the emitter, one of `EMITTERS`; None for the emitter in the name.

    Raises:
      TargetError: there is no such target, or it has no such emitter.
    """
    if isinstance(name, str) and "+" in name and emitter is None:  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass anything
        name, _, emitter = name.partition("+")
    if emitter is not None:
        return _with_emitter(resolve(name), emitter)
    target = TARGETS.get(name) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance] -- users pass anything
    if isinstance(name, str) and name == "cpu":  # pyright: ignore[reportUnnecessaryIsInstance] -- as above
        target = replace(_cpu_here(), falls_back=True)
    if target is None:
        raise TargetError(
            "there is no such target",
            expected=f"'cpu' or one of {', '.join(map(repr, TARGETS))}",
            got=f"target = {name!r}",
            fix=f"name one of these; {DEFAULT.name!r}, the portable backend, runs on every platform of JAX",
        )
    return target


def _with_emitter(target: Target, emitter: str) -> Target:
    """The target with an emitter that a user named."""
    emitters = EMITTERS if target.name in WARP_SPECIALIZED else EMITTERS[:1]
    if target.backend != "triton" or emitter not in emitters:
        raise TargetError(
            f"{target.name} has no emitter {emitter!r}",
            expected=f"one of {', '.join(map(repr, emitters))}" if target.backend == "triton" else "no emitter",
            got=f"emitter = {emitter!r}",
            fix=f"leave the emitter out; 'gluon' and 'auto' are for {', '.join(WARP_SPECIALIZED)}",
        )
    return replace(target, emitter="" if emitter == "triton" else emitter)
