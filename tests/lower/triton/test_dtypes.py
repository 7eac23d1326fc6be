"""Names of dtypes in Triton."""

import pytest

from tilekern.ir.types import DTYPES
from tilekern.lower.triton.dtypes import TRITON_DTYPES


def test_every_dtype_has_a_name_of_its_width() -> None:
    assert TRITON_DTYPES.keys() == DTYPES.keys()
    language = pytest.importorskip("triton.language", reason="needs triton")
    for name, text in TRITON_DTYPES.items():
        bits = 1 if name == "bool" else 8 * DTYPES[name].itemsize
        assert getattr(language, text).primitive_bitwidth == bits
