import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
import time
import thinwire
from tests.harness import run_ranks

def body(rank, world):
    m = nn.Sequential(*[nn.Linear(50,50) for _ in range(10)])
    ddp = DDP(m, bucket_cap_mb=0.001)
    wire = thinwire.attach(ddp, thinwire.Exact(), check_every=1)
    for i in range(5):
        torch.manual_seed(rank+10*i)
        ddp(torch.randn(4, 50)).sum().backward()
    return wire.stats(), [p.grad for p in m.parameters()]

def test_it():
    t=time.time()
    out = run_ranks(body, 3)
    print(out[0][0], out[0][0].last.order, out[0][0].last.compute_seconds, time.time()-t)
    for a,b in zip(out[0][1], out[1][1]): assert torch.equal(a,b)
    assert 0
