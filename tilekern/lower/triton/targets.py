"""The targets of the Triton backend, and this machine's GPUs among them."""

from __future__ import annotations

from dataclasses import replace

from tilekern import _machine
from tilekern.errors import TargetError
from tilekern.lower.backend import OPEN, Target

BACKEND_NAME = "triton"

CUSTOM_CALL = "triton_kernel_call_ffi"
"""The name of jaxlib's custom call that launches Triton's code."""

# "auto" is Gluon where a kernel has a warp-specialised form that is worth it.
_EMITTERS = ("triton", "gluon", OPEN)
_WARP_SPECIALIZED = ("sm_90",)


def _nvidia(model: str) -> Target:
    emitters = _EMITTERS if model in _WARP_SPECIALIZED else _EMITTERS[:1]
    return Target(f"cuda:{model}", "cuda", BACKEND_NAME, emitters=emitters)


def _amd(model: str) -> Target:
    return Target(f"rocm:{model}", "rocm", BACKEND_NAME, like="cuda:sm_80", emitters=_EMITTERS[:1])


NVIDIA = {
    target.name: target for target in map(_nvidia, ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"))
}
AMD = {target.name: target for target in map(_amd, ("gfx942", "gfx950"))}

# Any GPU of NVIDIA that tilekern has code for runs it.
_PORTABLE = replace(NVIDIA["cuda:sm_80"], portable=True)


def detect(platform: str, exporting: bool) -> Target | None:
    """The target for this machine's NVIDIA GPU; code for any GPU if there is none, or if its model is unknown.

    Where a model has the emitter "auto", the target has it: a call that names no target runs the faster program.
    Calls on AMD's GPUs that name no target are left to the portable backend.

    Raises:
      TargetError: the GPU is too old.
    """
    if platform != "cuda":
        return None
    capability = None if exporting else _machine.compute_capability()
    if capability is None:
        return _PORTABLE
    if capability < 80:
        raise TargetError(
            "tilekern has no code for this GPU",
            expected="compute capability 8.0 or newer",
            got=f"compute capability {capability // 10}.{capability % 10}",
            fix='call with target="cpu:xla": the portable backend runs on every GPU of JAX',
        )
    target = NVIDIA.get(f"cuda:sm_{capability}", _PORTABLE)
    return replace(target, emitter=OPEN) if OPEN in target.emitters else target


def is_here(target: Target) -> bool:
    """True if calls on this machine's GPU have the code of a target."""
    if target.platform == "rocm":
        return target.name == f"rocm:{_machine.amd_architecture()}"
    capability = _machine.compute_capability()
    served = None if capability is None else detect("cuda", exporting=False)
    return served is not None and served.name == target.name


def check_runs_here(target: Target, name: str) -> None:
    """Refuse machine code that no GPU of this machine runs; a machine without GPUs may compile for all.

    Args:
      target: the target of the code.
      name: of the kernel.

    Raises:
      TargetError: this machine has GPUs of the target's platform, all of other models.
    """
    models = _models_here(target.platform)
    if target.portable or not models or any(_runs_on(target, model) for model in models):
        return
    raise TargetError(
        f"{name} is compiled for another GPU than that of this machine",
        expected=f"a GPU that runs the code of {target.name}",
        got=f"a GPU of {', '.join(f'{target.platform}:{model}' for model in models)}",
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
    own_model = target.name.partition(":")[2]
    if target.platform != "cuda" or int(own_model[3:]) >= 90:
        return own_model == model
    return own_model[3:-1] == model[3:-1] and int(own_model[3:]) <= int(model[3:])
