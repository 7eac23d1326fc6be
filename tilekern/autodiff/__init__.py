"""Derivatives of a Func: its tangent Func, and the transpose of a Func that is linear in some inputs."""
