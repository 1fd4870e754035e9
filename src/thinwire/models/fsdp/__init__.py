"""FSDP2 models (`fully_shard`): the only room that touches their internals."""
