"""OpenAI-compatible HTTP. ``app.create_app`` makes the application, ``serving.run_server`` runs it."""
