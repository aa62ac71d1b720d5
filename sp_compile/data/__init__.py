"""The same batches for the ranks that share a sequence, other ones for their data-parallel neighbours.

mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "sp"))
loader = SequenceLoader(DataLoader(dataset, batch_size=2, shuffle=True), mesh)      # of the loader that you have
loader = DataLoader(dataset, batch_size=2, sampler=SequenceSampler(dataset, mesh))  # or in place of its sampler
loader = SequenceLoader(stream, mesh, reads="first")                                # one rank reads for its sequence
"""

from .loader import SequenceLoader
from .replica import Replica, replica_of
from .sampler import SequenceSampler

__all__ = ["Replica", "SequenceLoader", "SequenceSampler", "replica_of"]
