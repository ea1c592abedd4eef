"""The laboratory: the papers' figures in virtual time. Specs, runs, rows beside the papers' numbers, plots, one page.

No part of the package that is installed: it reads ``jettison`` as any other program would, and ``jettison reproduce``
finds it in a checkout.
"""
