"""The public record of devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

import tilekern as tk
from tests.lang.checks import refused
from tilekern.errors import TargetError
from tilekern.lower.mosaic.chip import CHIPS as TPUS
from tilekern.lower.target import TARGETS, device_of
from tilekern.lower.triton.chip import CHIPS as GPUS


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_every_target_has_a_record(name: str) -> None:
    found = tk.device(name)
    assert (found.target, found.platform) == (name, TARGETS[name].platform)
    if name in GPUS:
        assert found.lanes == (64 if found.platform == "rocm" else 32) and found.fast_memory == GPUS[name].shared_bytes
        # Products of large matrices take longer than their loads: operations for each byte of memory.
        assert found.cores > 80 and found.gpu and 100 < found.flops / found.bandwidth < 500
    elif name in TPUS:
        assert (found.lanes, found.sublanes) == (128, 8) and found.fast_memory == TPUS[name].vmem_budget
    else:
        assert found == tk.Device(name, "cpu")


def test_a_portable_program_for_tpus_has_the_least_memory() -> None:
    portable = device_of(replace(TARGETS["tpu:v5e"], portable=True))
    assert portable.fast_memory == min(chip.vmem_budget for chip in TPUS.values()) < tk.device("tpu:v5e").fast_memory


def test_a_portable_program_for_gpus_has_the_least_memory() -> None:
    portable = device_of(replace(TARGETS["cuda:sm_80"], portable=True))
    assert portable.fast_memory == tk.device("cuda:sm_86").fast_memory < tk.device("cuda:sm_80").fast_memory


def test_an_unknown_device() -> None:
    with refused(TargetError, "there is no such target", expected="'cpu' or one of", got="'gpu'", fix="'cpu:xla'"):
        tk.device("gpu")  # <-


def test_a_schedule_gets_the_device() -> None:
    seen: list[Any] = []

    @tk.kernel(out_type=lambda x: x)
    def copy(x, out, *, block: tk.Block = 4):
        i = tk.parallel(x.shape[0], block)
        out[i] = x[i]

    @copy.schedule("")
    def schedule(x: Any, device: tk.Device) -> dict[str, int]:
        seen.append(device)
        return {"block": 8}

    traced = copy.trace(jax.ShapeDtypeStruct((16,), np.float32))
    for name in ("cuda:sm_90", "tpu:v5e"):
        del seen[:]
        assert traced.lower(name).ir.axes[0].block == 8
        assert set(seen) == {tk.device(name)}
