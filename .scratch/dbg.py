import sys, time, traceback, os, tempfile
import torch
from torch import nn
sys.path.insert(0,"src"); sys.path.insert(0,".")
os.environ["HOTLAP_CACHE"]=tempfile.mkdtemp()
import hotlap
from benchmarks import work
from torch.utils.data import DataLoader, TensorDataset
from hotlap.engine import recording
from hotlap.tuner.gates import Gate
from hotlap.core.plan import Feed
real=recording.Recorder.record
def record(self, w):
    t=time.perf_counter()
    try:
        return real(self, w)
    except Exception as e:
        print("RECORD FAILED"); traceback.print_exc(limit=-12, file=sys.stdout); print("CAUSE"); 
        if e.__cause__: traceback.print_exception(e.__cause__, limit=-14, file=sys.stdout)
        raise
    finally:
        print(f"  record {time.perf_counter()-t:.3f}s")
recording.Recorder.record=record
def data(shape,n=20000):
    g=torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(n,*shape,generator=g), torch.randint(3,(n,),generator=g))
def mlp():
    return nn.Sequential(nn.Linear(100,256),nn.BatchNorm1d(256),nn.ReLU(),nn.Dropout(0.1),nn.Linear(256,128),nn.BatchNorm1d(128),nn.ReLU(),nn.Linear(128,3))
from hotlap.tuner import tuner as T, trials as TR
T0=time.perf_counter()
obey=T.Tuner._obey
def traced(self, asked):
    t=time.perf_counter(); steps=self._rig.steps
    obey(self, asked)
    if str(asked)!=getattr(self,"_last",""):
        print(f"  {t-T0:7.2f} step {steps} ask {asked} (use {time.perf_counter()-t:.3f}s)"); self._last=str(asked)
T.Tuner._obey=traced
go=T.Tuner._go_on
def go_on(self, lap):
    t=time.perf_counter()
    print(f"  {t-T0:7.2f} lap {lap.step_s*1e3:.3f} ms, {lap.updates} updates in {lap.wall_s:.3f}s")
    go(self, lap)
    if time.perf_counter()-t>0.05: print(f"          thought {time.perf_counter()-t:.2f}s")
T.Tuner._go_on=go_on
wn=TR.Trials.why_not
def why_not(self, plan, moves):
    t=time.perf_counter(); r=wn(self,plan,moves); print(f"  gate {time.perf_counter()-t:.2f}s {plan} {r}"); return r
TR.Trials.why_not=why_not
what=sys.argv[1]
if what=="gate":
    m={"lstm":work.Lstm,"transformer":work.Transformer,"mlp":mlp}[sys.argv[2]]()
    shape=(100,) if sys.argv[2]=="mlp" else (20,29)
    rig=hotlap.Rig(m, lambda p: torch.optim.AdamW(p,lr=1e-3), nn.CrossEntropyLoss())
    it=rig.feed(DataLoader(data(shape),batch_size=128,shuffle=True), epochs=50)
    for _ in range(40): rig.advance(next(it))
    rig.keep_plans(); g=Gate(rig, rig.plan)
    res=rig.plan.with_feed(Feed(kind="resident"))
    for plan in (rig.plan.but(optimizer="fused"), res, res.but(optimizer="fused",mode="captured",replay_steps=8), res.but(optimizer="fused",mode="captured",replay_steps=8,precision="bf16"), res.but(optimizer="fused",mode="captured",replay_steps=8,precision="tf32")):
        for _ in range(2):
            t=time.perf_counter(); j=g.check(plan); print(f"{(time.perf_counter()-t):.3f} s", plan, j.ok, j.why, {k:round(v,6) for k,v in j.figures.items()})
            rig.advance(next(it))
else:
    name=what
    if name=="resnet":
        w=next(w for w in work.WORKS if w.name=="ResNet-18, batch 32")
        d=w.data(); model=w.build()
        job=hotlap.Job(model=model,data=DataLoader(TensorDataset(d.x,d.y),batch_size=32,shuffle=True),loss=nn.CrossEntropyLoss(),optimizer=w.optimizer(model),steps=int(sys.argv[2]),prepare=work.Normalise(torch.device("cuda")))
    make={"lstm":work.Lstm,"transformer":work.Transformer,"mlp":mlp,"resnet":mlp}[name]
    shape=(100,) if name in("mlp","resnet") else (20,29); bs=256 if name=="mlp" else 128
    model=make() if name!="resnet" else model
    job=job if name=="resnet" else hotlap.Job(model=model,data=DataLoader(data(shape,100000),batch_size=bs,shuffle=True),loss=nn.CrossEntropyLoss(),optimizer=torch.optim.AdamW(model.parameters(),lr=1e-3),steps=int(sys.argv[2]))
    out=tempfile.mkdtemp()+"/r"
    t=time.perf_counter(); t0=t
    run=hotlap.fit(job,plan="auto",out=out,progress=False)
    print(f"{time.perf_counter()-t:.2f} s")
    print(run.summary())
    n=0
    for e in run.ledger:
        if e.outcome!="measured": print(e.step,e.what[:60],e.outcome,e.why[:160],{k:round(v,5) for k,v in e.figures.items()},round(e.cost_s,3))
        else: n+=1
    print(n,"laps")
