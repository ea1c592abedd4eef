"""Sockets between a controller and its front ends, in a folder that is its user's alone."""

from __future__ import annotations


def channel_path(folder: str) -> str:
    """Where a controller takes front ends."""
    return f"{folder}/fronts"


def forward_path(folder: str) -> str:
    """Where it serves its own application."""
    return f"{folder}/http"
