"""FSDP2 models (`fully_shard`): the only room that touches their internals.

`thinwire.attach(model, program, replicas=mesh["replicate"])` exchanges gradients between replicas of such a
model. `compress_reduce_scatter` compresses what one replica's shards exchange among themselves.
"""

from thinwire.fsdp.reduce_scatter import CompressedReduceScatter, compress_reduce_scatter

__all__ = ["CompressedReduceScatter", "compress_reduce_scatter"]
