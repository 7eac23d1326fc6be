"""The builder of ops for rewrites, see `ir.make`."""

from tilekern.ir.make import Make as Make
