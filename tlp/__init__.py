"""TLP fleet: keeps tensor-program cost models true on a fleet of devices.

The product's logic. Never imports prefect; `flows/` does. Subpackages are imported on use, so that
`import tlp` costs milliseconds.
"""

__version__ = "0.1.0"
