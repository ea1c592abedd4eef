"""Mechanisms that move KV, requests and parameters between groups and workers. None decides whether to begin: the
ladder does."""
