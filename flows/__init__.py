"""Prefect flows: each one a typed request → named steps → a report. They run with or without a Prefect server."""
