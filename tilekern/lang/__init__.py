"""The language: tiles and refs, and the tracing of a body, by JAX, to block IR."""
