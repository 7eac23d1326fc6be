"""The language: tiles and refs, and the tracing of a body to block IR by way of JAX."""
