"""Answers read as they grow: thoughts, content and tool calls apart. Pure text in, parts out; no HTTP and no tokens.

``parts`` has what a parser says, ``machine`` what most are made of, ``registry`` their names and how one is chosen.
"""
