"""Target-neutral passes over the block IR, one file each; `pipeline` is their order."""
