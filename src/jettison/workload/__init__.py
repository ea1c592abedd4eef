"""Traces, arrival processes, lengths, the replay client."""
