"""How: mechanisms that move memory and requests. None decides whether to begin."""
