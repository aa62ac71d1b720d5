"""Run `python -m sp_compile`."""

import sys

from sp_compile.cli import main

sys.exit(main())
