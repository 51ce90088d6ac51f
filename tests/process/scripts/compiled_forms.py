"""One way to compile (first argument) with one backend (second) and a number of backwards per step (third).

Prints losses, bit by bit, and the number of graphs and breaks that Dynamo counted.
"""

import json
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch._dynamo.utils import counters

form, backend, backwards = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.down(self.drop(nn.functional.gelu(self.up(x))))


net = nn.Sequential(Block(), Block(), nn.Linear(64, 64))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
run: Callable = net
step = optimizer.step
if form == "module":
    run = torch.compile(net, backend=backend)
elif form == "full":
    run = torch.compile(net, backend=backend, fullgraph=True)
elif form == "reduce":
    run = torch.compile(net, mode="reduce-overhead")
elif form == "optimize":
    run = torch._dynamo.optimize(backend)(net)
elif form == "inplace":
    net.compile(backend=backend)
elif form == "blocks":
    net[0], net[1] = torch.compile(net[0], backend=backend), torch.compile(net[1], backend=backend)
elif form == "blocks-inplace":
    net[0].compile(backend=backend)
    net[1].compile(backend=backend)
elif form == "function":
    run = torch.compile(lambda x: net(x), backend=backend)
elif form == "breaks":

    def broken(x):
        y = net(x)
        print("a break")
        return y * 2

    run = torch.compile(broken, backend=backend)
elif form == "step":
    step = torch.compile(lambda: optimizer.step(), backend=backend)

for i in range(4):
    for _ in range(backwards):
        loss = run(torch.randn(32, 64)).square().mean()
        loss.backward()
    step()
    optimizer.zero_grad()
    if i == 2:
        net.eval()
        with torch.no_grad():
            run(torch.randn(32, 64))
        net.train()
    print(i, loss.item().hex(), flush=True)
graphs = {key: value for key, value in counters["stats"].items() if key in ("calls_captured", "unique_graphs")}
print(json.dumps([graphs, sum(counters["graph_break"].values()), counters["frames"]]))
