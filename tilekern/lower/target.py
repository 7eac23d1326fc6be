"""The one list of backends and their targets, the names that users write, the target of a call, and its device."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

from tilekern.errors import ArgumentError, TargetError, checked
from tilekern.lower.backend import Backend, Device, Target
from tilekern.lower.llvm.backend import BACKEND as LLVM
from tilekern.lower.mosaic import backend as mosaic
from tilekern.lower.triton.backend import BACKEND as TRITON
from tilekern.lower.xla import backend as xla

BACKENDS: dict[str, Backend] = {}
"""All backends by name; `tilekern.backends.register` adds one."""

TARGETS: dict[str, Target] = {}
"""The targets of all backends, by name."""

_NAME_OF_TARGET = re.compile(r"\w+:[\w.-]+", re.ASCII)


def add(backend: Backend) -> None:
    """Add a backend that `check` took."""
    BACKENDS[backend.name] = backend
    TARGETS.update((target.name, target) for target in backend.targets)


def remove(name: str) -> None:
    """Remove a backend of another package.

    Raises:
      ArgumentError: no such backend was added.
    """
    if name not in BACKENDS or name in _OWN:
        added = [repr(name) for name in BACKENDS if name not in _OWN]
        raise ArgumentError(
            f"no backend {name!r} was registered",
            expected=f"one of {', '.join(added)}" if added else "a backend that `register` added before",
            got=f"name = {name!r}",
            fix="name a backend that `register` added; those of tilekern stay",
        )
    for target in BACKENDS.pop(name).targets:
        del TARGETS[target.name]


def check(backend: Backend) -> None:
    """Refuse a record that does not fit the others.

    Raises:
      ArgumentError: a name is taken, or the targets do not fit the backend.
    """
    names = [target.name for target in backend.targets]
    taken = [name for name in names if name in TARGETS or names.count(name) > 1]
    if backend.name in BACKENDS or taken:
        raise ArgumentError(
            f"the backend {backend.name!r} has a name that is taken",
            expected="names of a backend and of targets that no registered backend has",
            got=f"name = {backend.name!r}" if backend.name in BACKENDS else f"targets = {taken}",
            fix="choose another name, or take the earlier backend out: unregister(name)",
        )
    strays = [
        target.name
        for target in backend.targets
        if target.backend != backend.name
        or not _NAME_OF_TARGET.fullmatch(target.name)
        or target.name.partition(":")[0] != target.platform
    ]
    if strays or not names or backend.representative not in ("", *names):
        raise ArgumentError(
            f"the targets of the backend {backend.name!r} do not fit it",
            expected="at least one Target('platform:model', 'platform', backend=...) with the backend's name, one of "
            "which is `representative`",
            got=f"targets = {strays or names}, representative = {backend.representative!r}",
            fix="name the targets for JAX's name of the platform, and give them the name of the backend",
        )


for _backend in (xla.BACKEND, LLVM, TRITON, mosaic.backend(xla.run)):
    add(_backend)
_OWN = frozenset(BACKENDS)

# The portable backend: it runs on every platform of JAX.
DEFAULT = TARGETS["cpu:xla"]


def backend_of(target: Target) -> Backend:
    """The backend that lowers for a target."""
    return BACKENDS[target.backend]


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
        detected = (backend.detect(platform, exporting) for backend in BACKENDS.values())
        return next((target for target in detected if target is not None), DEFAULT)
    if asked.fallback == "always" and (exporting or asked.platform != platform):
        return DEFAULT
    if exporting and backend_of(asked).process_bound:
        raise TargetError(
            f"a call with target={asked.name!r} cannot be exported",
            expected="a program that another process can run",
            got=backend_of(asked).process_bound,
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
    """Refuse machine code that no device of this machine runs; a machine without such devices may compile for all.

    Args:
      target: the target of the code.
      name: of the kernel.

    Raises:
      TargetError: this machine has devices of the target's platform, all of other models.
    """
    backend_of(target).check_runs_here(target, name)


def resolve(name: str, emitter: str | None = None) -> Target:
    """The target of a name that a user writes; "cpu" is the fastest target for this CPU.

    Args:
      name: the target; an emitter may stand behind it, after a "+".
      emitter: the emitter, one of the target's `emitters`; None for the emitter in the name.

    Raises:
      TargetError: there is no such target, or it has no such emitter.
    """
    if not isinstance(cast(object, name), str):  # users pass anything
        raise _no_target(name)
    if "+" in name and emitter is None:
        name, _, emitter = name.partition("+")
    if emitter is not None:
        return _with_emitter(resolve(name), emitter)
    if name == "cpu":
        return replace(on_platform("cpu", None), fallback="always")
    if name not in TARGETS:
        raise _no_target(name)
    return TARGETS[name]


def _no_target(name: object) -> TargetError:
    return TargetError(
        "there is no such target",
        expected=f"'cpu' or one of {', '.join(map(repr, TARGETS))}",
        got=f"target = {name!r}",
        fix=f"name one of these; {DEFAULT.name!r}, the portable backend, runs on every platform of JAX",
    )


def _with_emitter(target: Target, emitter: str) -> Target:
    """The target with an emitter that a user named."""
    if emitter not in target.emitters:
        raise TargetError(
            f"{target.name} has no emitter {emitter!r}",
            expected=f"one of {', '.join(map(repr, target.emitters))}" if target.emitters else "no emitter",
            got=f"emitter = {emitter!r}",
            fix=f"leave the emitter out{_targets_of(emitter)}",
        )
    return replace(target, emitter="" if emitter == target.emitters[0] else emitter)


def _targets_of(emitter: str) -> str:
    """The targets that have an emitter, as the end of a sentence; "" if there is none."""
    names = [target.name for target in TARGETS.values() if emitter in target.emitters]
    return f"; {emitter!r} is for {', '.join(names)}" if names else ""


# --- devices ----------------------------------------------------------------------------------------------------------


def device_of(target: Target) -> Device:
    """The record of the machine of a target."""
    return backend_of(target).device(target)


@checked
def device(target: str) -> Device:
    """The record of the machine that a target names, for schedules.

    Args:
      target: "cpu", "cpu:xla", "cpu:llvm", "cuda:sm_90", "tpu:v5e" or another target.

    Raises:
      tilekern.errors.TargetError: there is no such target.
    """
    return device_of(resolve(target))
