"""Packages that register themselves in the tables of lower rooms: importing this module makes them known."""

import tlp.felix  # noqa: F401
