"""The portable backend: plain XLA operations, on any platform that JAX has.

plan.emit    which grid axes run one after the other and which at once
access       loads and stores as slices, or as gathers where nothing is proved
ops          pure ops as functions of `jax.lax`
emit         blocks, control flow and the grid
"""
