"""Every private torch name that the package uses, and nothing else: the only import point is this package.

One module a subject; what a module imports or defines is what it gives. Tried on torch 2.13 unless an entry says more;
imported on 2.11 to 2.15.
"""

from .checkpoints import *
from .compilers import *
from .dynamo import *
from .flex import *
from .groups import *
from .names import *
from .ops import *
from .tensors import *
from .thread_state import *
from .tracing import *
