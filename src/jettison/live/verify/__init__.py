"""The proof that memory moves change no token, and seeded deaths over live processes. Serves no client."""
