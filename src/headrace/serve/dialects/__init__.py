"""The dialects, each a pure translation between its wire format and `serve.request` and `serve.events`."""
