"""Benchmarks: commands that print tables and write JSON. Ratios within one run; machines differ and are noisy."""
