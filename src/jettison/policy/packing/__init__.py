"""Which device each request should live on, so that the fewest are in use (MELL, sections VI and VII). Pure."""
