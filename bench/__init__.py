"""Benchmarks: headrace beside its peers, in one run, as recorded rows, tables and plots."""
