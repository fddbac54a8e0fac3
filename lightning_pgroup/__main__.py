"""``python -m lightning_pgroup``."""

import sys

from lightning_pgroup.command_line import main

sys.exit(main())
