"""Matrix products: shapes, packing, microkernel, products of few rows."""
