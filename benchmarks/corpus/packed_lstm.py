"""A recurrent text classifier with packed sequences, whose lengths change with every batch."""

from digest import digest
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import torch
from torch import nn

torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self, vocabulary=5000, size=128, hidden=192):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, size, padding_idx=0)
        self.lstm = nn.LSTM(size, hidden, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3)
        self.attention = nn.Linear(2 * hidden, 1)
        self.fc = nn.Linear(2 * hidden, 4)

    def forward(self, text, lengths):
        packed = pack_padded_sequence(self.embedding(text), lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        weights = self.attention(output).squeeze(2).masked_fill(text[:, : output.shape[1]] == 0, float("-inf")).softmax(dim=1)
        return self.fc((output * weights.unsqueeze(2)).sum(dim=1))


model = Classifier()
optimizer = torch.optim.Adam(model.parameters())
criterion = nn.CrossEntropyLoss()
for step in range(12):
    lengths = torch.randint(20, 140, (32,))
    text = torch.randint(1, 5000, (32, int(lengths.max())))
    text[torch.arange(text.shape[1])[None] >= lengths[:, None]] = 0
    optimizer.zero_grad()
    loss = criterion(model(text, lengths), torch.randint(0, 4, (32,)))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(step, loss.item(), flush=True)
print(digest(model))
