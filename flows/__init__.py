"""Prefect flows: orchestration only. Each one runs as a deployment, or without any server (see `flows/_run.py`)."""
