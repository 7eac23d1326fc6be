"""The body of the Pallas kernel, op by op."""
