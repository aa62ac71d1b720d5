"""`python -m sp_compile`."""

import sys

from sp_compile.cost.plan.command import main

sys.exit(main())
