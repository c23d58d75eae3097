import sys, time, traceback, os, tempfile
import torch
from torch import nn
sys.path.insert(0,"src"); sys.path.insert(0,".")
import hotlap
from benchmarks import work
from torch.utils.data import DataLoader, TensorDataset
from hotlap.core.plan import Feed
g=torch.Generator().manual_seed(0)
ds=TensorDataset(torch.randn(20000,20,29,generator=g), torch.randint(3,(20000,),generator=g))
def trial(name, before, restore=False, p=0.1, toggled=False, aside=False, updates=1):
    m=work.Lstm(); m.lstm.dropout=p
    rig=hotlap.Rig(m, lambda p: torch.optim.AdamW(p,lr=1e-3,fused=True), nn.CrossEntropyLoss())
    it=rig.feed(DataLoader(ds,batch_size=128,shuffle=True), epochs=50)
    for _ in range(before): rig.advance(next(it))
    plan=rig.plan.with_feed(Feed(kind="resident")).but(mode="captured",replay_steps=updates)
    if toggled:
        m.lstm.dropout=0.0
        for _ in range(3): rig.advance(next(it))
        m.lstm.dropout=p
    snap=rig.snapshot() if restore else None
    rig.use(plan)
    for i in range(6):
        rig.advance(next(it))
        if restore: rig.restore(snap)
    torch.cuda.synchronize()
    print(name, "given up:", rig.given_up)
print(torch.__version__, torch.backends.cudnn.version())
w=sys.argv[1]
if w=="1": trial("captured from the start", 0)
if w=="2": trial("40 eager steps before", 40)
if w=="3": trial("40 before, restore", 40, restore=True)
if w=="4": trial("from start, restore", 0, restore=True)
if w=="5": trial("40 before, toggled", 40, toggled=True)
if w=="6": trial("40 before, 8 updates", 40, updates=8)
if w=="7": trial("40 before, no dropout", 40, p=0.0)
if w=="8":
    trial("first rig", 0); trial("second rig, same process", 40)
if w=="9":
    with torch.cuda.stream(torch.cuda.Stream()):
        trial("40 before on a side stream", 40)
