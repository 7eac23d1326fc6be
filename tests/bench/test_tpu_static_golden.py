"""No library kernel may take over 5 % more cycles than golden_cycles.json says, by the static estimate."""

import os
from pathlib import Path

import pytest

from bench.tpu_static.golden import KERNEL_CASES, Golden, cycles

pytest.importorskip("libtpu", reason="needs libtpu")

GOLDEN = Path(__file__).with_name("golden_cycles.json")


@pytest.mark.sweep(8)
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("case", KERNEL_CASES)
def test_no_kernel_gets_slower(case: str, chip: str) -> None:
    """UPDATE_GOLDEN=1 writes the numbers anew (with -n 0); read the diff."""
    golden, key = Golden(GOLDEN), f"{case} {chip}"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.update(key, cycles(case, chip))
    elif why := golden.unfit():
        pytest.skip(why)
    else:
        assert not (wrong := golden.check(key, cycles(case, chip))), wrong
