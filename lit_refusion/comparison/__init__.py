"""Comparing runs: control, statistics, throughput, report."""
