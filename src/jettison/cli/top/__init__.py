"""``jettison top``: the console's data in a terminal. ``reading`` asks a server, ``tables`` makes rows of what it said,
``screen`` shows them."""
