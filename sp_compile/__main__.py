"""`python -m sp_compile`."""

import sys

from sp_compile.planner.command import main

sys.exit(main())
