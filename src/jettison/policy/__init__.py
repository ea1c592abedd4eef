"""Pure decisions, one noun a file."""
