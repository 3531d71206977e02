"""What a server tells about itself and its requests: log, metrics, status."""
