"""The parent of a server with front ends: a small process that binds, starts the controller and the front ends, and
starts either again (``--api-servers N``, N from 1 on)."""
