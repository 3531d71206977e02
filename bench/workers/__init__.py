"""Programs that run one system each. A worker imports its system and the standard library, NumPy at most."""
