"""Compile a program ahead of time: `python -m tilekern.estimate.tpu.child CHIP FOLDER < PROGRAM`.

FOLDER/compiled.txt gets the HLO of the compiled program, which has the VMEM that each kernel takes.

A process of its own, for libtpu reads its flags once. It dumps what LIBTPU_INIT_ARGS says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tilekern.estimate.tpu.chips import chip


def main(name: str, folder: Path, source: str) -> None:
    """Compile `fn(*args)` of the source for a chip.

    Arguments that are NumPy arrays become constants of the program, so that their values are in the dump. The program
    may overwrite the arguments whose numbers are in `donated`, if the source defines it; `options` are the compiler's.
    """
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(source, "<program>", "exec"), namespace)
    function: Callable[..., Any] = namespace["fn"]
    arguments: Sequence[Any] = namespace["args"]
    donated: Sequence[int] = namespace.get("donated", ())
    options: dict[str, Any] | None = namespace.get("options")
    slice_: Any = topologies.get_topology_desc(platform="tpu", topology_name=chip(name).topology)
    mesh = Mesh(np.array(slice_.devices[:1]), ("device",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec())
    values: list[np.ndarray[Any, Any] | jax.ShapeDtypeStruct] = [
        x if isinstance(x, np.ndarray) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arguments
    ]

    def program(*traced: jax.Array) -> object:
        tracers = iter(traced)
        return cast(object, function(*(x if isinstance(x, np.ndarray) else next(tracers) for x in values)))

    traced = [number for number, x in enumerate(values) if not isinstance(x, np.ndarray)]
    shapes = [values[number] for number in traced]
    overwritten = tuple(k for k, number in enumerate(traced) if number in donated)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(program, donate_argnums=overwritten).lower(*shapes)
    (folder / "compiled.txt").write_text(lowered.compile(compiler_options=options).as_text() or "")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.stdin.read())
