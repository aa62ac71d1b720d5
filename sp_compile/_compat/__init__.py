"""Every private torch name that the package uses, and nothing else: the only import point is this package.

One module a subject; each entry says with which versions of torch it was tried.
"""

from .compilers import *  # noqa: F403
from .dynamo import *  # noqa: F403
from .groups import *  # noqa: F403
from .ops import *  # noqa: F403
from .tensors import *  # noqa: F403
from .tracing import *  # noqa: F403
