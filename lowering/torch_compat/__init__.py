"""Collect every private torch name that the package uses; other folders import them from here.

Each module covers one subject and exports all that it imports or defines. Tested on torch 2.13 unless an entry states
more; imported on 2.11 to 2.15.
"""

from .checkpoints import *
from .compiled_backwards import *
from .compilers import *
from .dynamo import *
from .flex import *
from .folded_reads import *
from .groups import *
from .leaves import *
from .names import *
from .ops import *
from .tensors import *
from .thread_state import *
from .tracing import *
