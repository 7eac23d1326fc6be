"""Plan of a Func for a TPU core: grid, blocks in VMEM, loops, and the VMEM that they take."""
