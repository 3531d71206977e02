"""HTTP/1.1: what may be sent, by whom and how much, and where it goes."""
