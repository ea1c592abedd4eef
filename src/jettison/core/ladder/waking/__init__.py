"""Sleep and waking: which workers sleep, which are woken, and where offline work goes when some are."""
