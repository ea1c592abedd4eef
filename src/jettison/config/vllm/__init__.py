"""vLLM's command line: its flags as data, what each becomes here, and lines of it as lines of ours.

Standard library only. ``jettison.cli`` applies it to ``jettison serve`` and its kin, ``jettison.server.llm`` to
keywords.
"""
