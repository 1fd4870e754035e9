"""Triton kernels for the two-shot exchange of block codecs on GPUs, with the bits of the C kernels.

Nothing here imports Triton until `launch` calls a kernel, so thinwire does not depend on it.
"""
