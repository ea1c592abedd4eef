"""The only code that imports torch."""
