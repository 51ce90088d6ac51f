"""Loops as public example repositories write them, one by name: each prints its losses and a digest of its weights.

In the manner of pytorch/examples (word language model, VAE, MNIST, actor-critic), of graph networks' message passing, and of
PPO in one file; nothing of Lowtide's.
"""

import hashlib
import sys

import torch
import torch.nn.functional as F
from torch import nn, optim


def digest(*models):
    found = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def word_language_model():
    """An LSTM over batched text, its state detached between chunks, gradients clipped and applied by hand."""

    class RNNModel(nn.Module):
        def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.2):
            super().__init__()
            self.drop = nn.Dropout(dropout)
            self.encoder = nn.Embedding(ntoken, ninp)
            self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
            self.decoder = nn.Linear(nhid, ntoken)
            self.ntoken, self.nhid, self.nlayers = ntoken, nhid, nlayers

        def forward(self, tokens, hidden):
            output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
            decoded = self.decoder(self.drop(output)).view(-1, self.ntoken)
            return F.log_softmax(decoded, dim=1), hidden

        def init_hidden(self, bsz):
            weight = next(self.parameters())
            return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))

    bptt, bsz, ntokens = 35, 20, 600
    data = torch.randint(0, ntokens, (bptt * 9 + 1, bsz))
    model = RNNModel(ntokens, 96, 96, 2)
    hidden = model.init_hidden(bsz)
    for batch, i in enumerate(range(0, data.size(0) - 1, bptt)):
        model.zero_grad()
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data[i : i + bptt], hidden)
        loss = F.nll_loss(output, data[i + 1 : i + 1 + bptt].reshape(-1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-5.0)
        print(batch, loss.item())
    print(digest(model))


def vae():
    class VAE(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
            self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

        def forward(self, x):
            h = F.relu(self.fc1(x.view(-1, 784)))
            mu, logvar = self.fc21(h), self.fc22(h)
            z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
            return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar

    model = VAE()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for epoch in range(2):
        model.train()
        for batch in range(5):
            data = torch.rand(4096, 1, 28, 28)
            optimizer.zero_grad()
            recon, mu, logvar = model(data)
            bce = F.binary_cross_entropy(recon, data.view(-1, 784), reduction="sum")
            loss = bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss.backward()
            optimizer.step()
            print(epoch, batch, loss.item())
        model.eval()
        with torch.no_grad():
            print("test", model(torch.rand(256, 1, 28, 28))[0].sum().item())
    print(digest(model))


def mnist():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 32, 3, 1), nn.Conv2d(32, 64, 3, 1)
            self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
            self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

        def forward(self, x):
            x = F.relu(self.conv2(F.relu(self.conv1(x))))
            x = self.dropout1(F.max_pool2d(x, 2))
            x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
            return F.log_softmax(self.fc2(x), dim=1)

    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    for epoch in range(2):
        for batch in range(4):
            data, target = torch.randn(64, 1, 28, 28), torch.randint(0, 10, (64,))
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            print(epoch, batch, loss.item())
        scheduler.step()
    print(digest(model))


def graph_network():
    """Message passing by gather and index_add, as graph libraries do it, over graphs of changing sizes."""

    class Conv(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.message = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))
            self.update = nn.Sequential(nn.Linear(2 * width, width), nn.SiLU(), nn.Linear(width, width))

        def forward(self, x, edges):
            source, target = edges
            messages = self.message(torch.cat([x[target], x[source]], -1))
            gathered = torch.zeros_like(x).index_add_(0, target, messages)
            return x + self.update(torch.cat([x, gathered], -1))

    convs, readout = nn.ModuleList(Conv(48) for _ in range(4)), nn.Linear(48, 1)
    optimizer = optim.AdamW([*convs.parameters(), *readout.parameters()], lr=1e-3)
    for step in range(9):
        nodes = 300 + 60 * (step % 3)
        x, edges, graph = torch.randn(nodes, 48), torch.randint(0, nodes, (2, 8 * nodes)), torch.randint(0, 16, (nodes,))
        for conv in convs:
            x = conv(x, edges)
        energy = torch.zeros(16, 1).index_add_(0, graph, readout(x))
        loss = F.l1_loss(energy, torch.randn(16, 1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*convs.parameters()], 10.0)
        optimizer.step()
        print(step, loss.item())
    print(digest(convs, readout))


def ppo():
    """Roll-outs without gradients, advantages, then epochs of mini-batches with clipped losses, in one file."""

    def layer(a, b, std=2**0.5):
        made = nn.Linear(a, b)
        nn.init.orthogonal_(made.weight, std)
        nn.init.constant_(made.bias, 0.0)
        return made

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic = nn.Sequential(layer(24, 256), nn.Tanh(), layer(256, 256), nn.Tanh(), layer(256, 1, 1.0))
            self.actor = nn.Sequential(layer(24, 256), nn.Tanh(), layer(256, 256), nn.Tanh(), layer(256, 4, 0.01))

        def act(self, x, action=None):
            probs = torch.distributions.Categorical(logits=self.actor(x))
            action = probs.sample() if action is None else action
            return action, probs.log_prob(action), probs.entropy(), self.critic(x)

    agent = Agent()
    optimizer = optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
    for iteration in range(4):
        obs = torch.randn(64, 32, 24)
        with torch.no_grad():
            rolled = [agent.act(o) for o in obs]
        actions, logprobs, _, values = (torch.stack(found) for found in zip(*rolled, strict=True))
        rewards = torch.randn(64, 32)
        advantages, last = torch.zeros(64, 32), 0.0
        for t in reversed(range(63)):
            delta = rewards[t] + 0.99 * values[t + 1, :, 0] - values[t, :, 0]
            advantages[t] = last = delta + 0.95 * 0.99 * last
        flat = [x.reshape(-1, *x.shape[2:]) for x in (obs, actions, logprobs, advantages, advantages + values[..., 0])]
        for _ in range(2):
            for at in torch.randperm(2048).split(512):
                o, a, old, advantage, wanted = (x[at] for x in flat)
                _, new, entropy, value = agent.act(o, a)
                ratio = (new - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
                loss = policy - 0.01 * entropy.mean() + 0.25 * (value.view(-1) - wanted).square().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        print(iteration, loss.item())
    print(digest(agent))


if __name__ == "__main__":
    torch.manual_seed(1)
    globals()[sys.argv[1]]()
