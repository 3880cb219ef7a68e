"""Searches and samplers: which programs to measure next. Importing this package imports neither tvm nor torch."""
