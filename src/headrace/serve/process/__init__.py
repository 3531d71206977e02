"""A server as a process: its lock, its signals, who uses it and when it ends."""
