"""Experts of a mixture-of-experts model: records on disk, slots in memory, and what moves between them.

Owns `ExpertSlots` and fills it. Must not know models, sequences or kernels; only `store` opens files.
"""
