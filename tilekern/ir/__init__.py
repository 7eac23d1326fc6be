"""The block IR: typed SSA over tiles, its verifier, text form and interpreter. Needs NumPy and ml_dtypes only."""
