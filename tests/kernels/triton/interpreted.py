"""Run exchanges in Triton's interpreter: `python -m tests.kernels.triton.interpreted`.

It needs a process of its own, because Triton decides when a kernel is defined whether it is interpreted. The
interpreter computes with numpy, so it checks indices, masks and tables, but not how a GPU rounds.
"""

import json
import os
import sys
import warnings

import torch

from tests.kernels.triton.exchange import KINDS, Exchange, Run
from tests.kernels.triton.exchange_topk import VALUES, SparseExchange, SparseRun

NARROW = {"sign": 64, "int2": 64}  # powers of two

EXCHANGES = {
    **{f"{kind}-of-{n}": Exchange(kind=kind, world=n, rank=n // 2) for kind in KINDS for n in (2, 3, 5)},
    **{f"{kind}-tame": Exchange(kind=kind, world=1, rank=0, hard=False) for kind in KINDS},
    **{f"{kind}-aliased": Exchange(kind=kind, rank=0, alias=True, keep=1.0) for kind in KINDS},
    **{f"{kind}-in-place": Exchange(kind=kind, alias=True, keep=None) for kind in KINDS},
    **{f"{kind}-narrow": Exchange(kind=kind, width=NARROW.get(kind, 136)) for kind in KINDS},
    "int4-bf16": Exchange(kind="int4", dtype=torch.bfloat16, exact_dtype=torch.bfloat16),
    "e4m3-fp16": Exchange(kind="e4m3", dtype=torch.float16, exact_dtype=torch.float16),
    "sign-bf16": Exchange(kind="sign", dtype=torch.bfloat16, exact_dtype=torch.float16),
    "int8-smallest": Exchange(kind="int8", width=8, world=13, rank=5),
    "int8-of-many": Exchange(kind="int8", width=8, world=70, rank=3),
    "int8-largest": Exchange(kind="int8", width=4096, blocks=2, hard=False),
}

SPARSE_EXCHANGES = {
    **{f"top-{kind}-of-5": SparseExchange(kind=kind, world=5, rank=2) for kind in VALUES},
    **{
        f"top-{kind}-aliased": SparseExchange(kind=kind, rank=0, alias=True, keep=1.0, width=136, ratio=0.2)
        for kind in VALUES
    },
    "top-int2-in-place": SparseExchange(kind="int2", alias=True, keep=None, width=64, ratio=0.25),
    "top-int2-wide": SparseExchange(kind="int2", width=4096, blocks=1, hard=False),
    "top-int2-of-many": SparseExchange(kind="int2", width=16, world=70, rank=3),
    "top-int4-bf16": SparseExchange(kind="int4", dtype=torch.bfloat16, exact_dtype=torch.bfloat16),
    "top-bf16-fp16": SparseExchange(kind="bf16", dtype=torch.float16, ratio=0.01),
}

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"  # `launch` imports the kernels later
    warnings.simplefilter("ignore")  # numpy's, about overflows
    results = {}
    runs = {
        **{name: Run(exchange) for name, exchange in EXCHANGES.items()},
        **{name: SparseRun(exchange) for name, exchange in SPARSE_EXCHANGES.items()},
    }
    for name, run in runs.items():
        tally = run.all()
        results[name] = {
            kernel: (tally.compared[kernel], tally.differing[kernel]) for kernel in tally.compared
        }
    json.dump(results, sys.stdout)
