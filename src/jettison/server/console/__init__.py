"""The console: a web page for operators at ``/console``, and the data behind it.

Nothing here runs in a step. ``journal`` takes a row as a request ends; all else is made while a page asks.
"""
