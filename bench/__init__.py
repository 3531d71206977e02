"""Benchmarks: what is measured, the rows that are recorded, and the page that shows them.

Nothing here is imported by headrace. Peers run in processes of their own interpreters.
"""
