"""`python -m tlp.pipeline.night SHARE`: measure a device's share of a night, see `_share`."""

import sys

from tlp.pipeline.night._share import main

sys.exit(main(sys.argv[1]))
