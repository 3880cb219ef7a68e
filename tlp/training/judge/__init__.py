"""Judging a version: scores on held-out networks, baselines, intervals, the gate."""
