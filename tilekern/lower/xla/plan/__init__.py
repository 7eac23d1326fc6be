"""Plan of a Func for XLA: programs that run at once, and the memory that they take."""
