"""sentence-transformers: an encoder of random weights with MultipleNegativesRankingLoss, in the library's old fit idiom."""

import random
from tempfile import TemporaryDirectory

from digest import digest
from offline_tokenizer import tokenizer
from sentence_transformers import SentenceTransformer, losses, models
from transformers import BertConfig, BertModel

import torch

torch.manual_seed(0)
chance = random.Random(0)
with TemporaryDirectory() as folder:
    words = tokenizer()
    words.save_pretrained(folder)
    BertModel(BertConfig(vocab_size=len(words), hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=512)
              ).save_pretrained(folder)
    word = models.Transformer(folder, max_seq_length=128)
model = SentenceTransformer(modules=[word, models.Pooling(word.get_word_embedding_dimension())], device="cpu")
loss_model = losses.MultipleNegativesRankingLoss(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)


def text():
    return " ".join(f"w{chance.randrange(1000)}" for _ in range(chance.randrange(10, 100)))


model.train()
for step in range(12):
    pairs = [[text() for _ in range(16)] for _ in range(2)]
    features = [model.tokenize(side) for side in pairs]
    loss = loss_model(features, labels=None)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item(), flush=True)
print(digest(model))
