"""Plan of a Func for a GPU: TMA copies, partial sums, launch options."""
