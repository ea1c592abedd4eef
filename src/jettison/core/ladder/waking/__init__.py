"""Wake: which workers sleep, which are woken, and what offline work does of that."""
