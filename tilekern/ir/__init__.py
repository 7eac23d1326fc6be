"""The block IR: typed SSA over tiles, its verifier, text form and interpreter. Needs NumPy and ml_dtypes only."""

from tilekern.ir import text as text  # gives `str(func)` the text form
