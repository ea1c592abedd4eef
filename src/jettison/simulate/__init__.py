"""Whole experiments in virtual time: a workload meets a simulated cluster, and a result comes out."""
