"""The sequence-to-sequence model with attention of 2018 whose memory, phase by phase, was looked at on a GPU then.

Recorded here on the CPU: `python examples/seq2seq_2018.py` prints what is allocated after each phase of three steps, and the
highest so far, beside the figures of then (MiB, CUDA, 2018), and the findings that answer the questions asked of them.
Gradients are zeroed, not freed, and the logits stay in a local variable, as then: both show in the findings.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

VOCABULARY, EMBEDDING, HIDDEN, BATCH, LENGTH, STEPS = 30_000, 500, 1_000, 80, 50, 3

MEASURED_2018 = {
    "zero_grad": ((281, 281), (1581, 3482), (1581, 4329)),
    "forward": ((2108, 2154), (2955, 3482), (2955, 4329)),
    "loss": ((2566, 2566), (3413, 3482), (3413, 4329)),
    "backward": ((1020, 3482), (1581, 4329), (1581, 4329)),
    "optimizer": ((1581, 3482), (1581, 4329), (1581, 4329)),
}
"""Phase -> per step (allocated at its end, highest so far), MiB."""


class Attention(nn.Module):
    """Additive attention of a state over a memory."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.keys = nn.Linear(2 * hidden, hidden, bias=False)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.score = nn.Linear(hidden, 1, bias=False)

    def forward(self, state: torch.Tensor, keys: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """State (batch, hidden) over memory (batch, length, 2 hidden) to a context (batch, 2 hidden)."""
        scores = self.score(torch.tanh(keys + self.query(state)[:, None])).squeeze(2)
        weights = torch.softmax(scores.masked_fill(mask, -torch.inf), 1)
        return torch.bmm(weights[:, None], memory).squeeze(1)


class Seq2Seq(nn.Module):
    """A bidirectional GRU encoder over a packed sequence; a decoder of two GRU cells with attention between them."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, EMBEDDING)
        self.target = nn.Embedding(VOCABULARY, EMBEDDING)
        self.encoder = nn.GRU(EMBEDDING, HIDDEN, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(HIDDEN, HIDDEN)
        self.first = nn.GRUCell(EMBEDDING, HIDDEN)
        self.attention = Attention(HIDDEN)
        self.second = nn.GRUCell(2 * HIDDEN, HIDDEN)
        self.readout = nn.Linear(EMBEDDING + HIDDEN + 2 * HIDDEN, EMBEDDING)
        self.words = nn.Linear(EMBEDDING, VOCABULARY)

    def forward(self, source: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Source and target ids (batch, length) to logits (batch, length, vocabulary)."""
        packed = nn.utils.rnn.pack_padded_sequence(self.source(source), lengths, batch_first=True)
        outputs, last = self.encoder(packed)
        memory, _ = nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)
        keys = self.attention.keys(memory)
        mask = torch.arange(memory.shape[1])[None] >= lengths[:, None]
        state = torch.tanh(self.bridge(last[1]))
        embedded = self.target(target)
        states, contexts = [], []
        for step in range(target.shape[1]):
            middle = self.first(embedded[:, step], state)
            context = self.attention(middle, keys, memory, mask)
            state = self.second(context, middle)
            states.append(state)
            contexts.append(context)
        found = torch.cat([embedded, torch.stack(states, 1), torch.stack(contexts, 1)], 2)
        return self.words(torch.tanh(self.readout(found)))


def train() -> None:
    """Three steps."""
    torch.manual_seed(0)
    model = Seq2Seq()
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    criterion = nn.CrossEntropyLoss(reduction="sum")
    source, target = torch.randint(0, VOCABULARY, (2, BATCH, LENGTH))
    lengths = torch.full((BATCH,), LENGTH)
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        logits = model(source, lengths, target)
        loss = criterion(logits.view(-1, VOCABULARY), target.reshape(-1)) / BATCH
        loss.backward()
        optimizer.step()
        print(f"loss {loss.item():.6f}", file=sys.stderr)


def table(file: Path) -> list[tuple[str, int, int, int, int, int]]:
    """Rows (phase, step, allocated, highest so far, then allocated, then highest), MiB."""
    from lowtide.recording.reader import read

    rows = []
    for row in read(file).steps[-STEPS:]:
        for phase in MEASURED_2018:
            figures = [p for p in row.phases if p.name == phase]
            if figures:
                last = figures[-1]
                high = max(p.high_water_bytes for p in figures)
                then = MEASURED_2018[phase][row.step]
                rows.append((phase, row.step, round(last.end_bytes / 2**20), round(high / 2**20), *then))
    return rows


def main() -> None:
    """Record, and print the table and the findings."""
    import lowtide
    from lowtide.recording.explanation.explanation import explain
    from lowtide.recording.reader import read

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seq2seq.lowtide"
        with lowtide.record(file):
            train()
        print(f"{'after':<10} step   allocated / highest     2018")
        for phase, step, now, high, then, then_high in table(file):
            print(f"{phase:<10} {step:>4}   {now:>9} / {high:<7}     {then:>4} / {then_high}")
        print()
        for finding in explain(read(file)).findings:
            print(f"{finding.saving_bytes / 2**20:8.0f} MiB  {finding.text}")


if __name__ == "__main__":
    main()
