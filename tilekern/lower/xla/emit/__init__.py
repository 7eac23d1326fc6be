"""Operations of XLA for each op."""
