"""The HTTP server: one internal request, one internal stream of events, one file a dialect."""
