"""The backend that generates: a loaded model, its line of requests and the thread that serves it."""
