"""Tools for libraries of kernels: checks of arguments, errors at the user's line, functions of the user over tiles.

The prebuilt kernels are written with `tilekern` and these alone. `tilekern.errors` has the classes of errors.
"""

from tilekern._jax import array_of, has_symbols, make_jaxpr
from tilekern.authoring.arguments import (
    LAUNCH_OPTIONS,
    PRECISIONS,
    at_line_of,
    describe,
    hide_frames,
    is_array,
    is_divided,
    is_traced,
    static_int,
    takes_python_numbers,
    type_beside,
)
from tilekern.authoring.closures import carry_arrays
from tilekern.authoring.elementwise import check_elementwise, ends_in_product, masked
from tilekern.authoring.keywords import unknown_keyword
from tilekern.authoring.meshes import advise_instead_of_gathers, by_rows, gathered
from tilekern.kernel.chunks import scan_rows
from tilekern.lang.incomparable import Incomparable

__all__ = [
    "LAUNCH_OPTIONS",
    "PRECISIONS",
    "Incomparable",
    "advise_instead_of_gathers",
    "array_of",
    "at_line_of",
    "by_rows",
    "carry_arrays",
    "check_elementwise",
    "describe",
    "ends_in_product",
    "gathered",
    "has_symbols",
    "hide_frames",
    "is_array",
    "is_divided",
    "is_traced",
    "make_jaxpr",
    "masked",
    "scan_rows",
    "static_int",
    "takes_python_numbers",
    "type_beside",
    "unknown_keyword",
]
