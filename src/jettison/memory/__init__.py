"""Pure bookkeeping of blocks, prefixes and pages."""
