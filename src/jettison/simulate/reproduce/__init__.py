"""The papers' figures reproduced in virtual time: specs, runs, rows beside the papers' numbers, plots, one page."""
