"""Small training scripts, as functions: the models of the test matrix.

Each entry of ``MODELS`` is a function of no arguments that builds its model and data and returns a ``Job``: a step to be
called again and again, and the modules and optimizers whose state counts. Nothing here knows of Lowtide.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Job:
    """A training loop cut into steps."""

    step: Callable[[int], torch.Tensor]
    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)


def seed(number: int) -> None:
    """Seed everything that draws."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def bits(tensor: torch.Tensor) -> bytes:
    """All bits of a tensor, held outside torch's allocator."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def outcome(job: Job) -> Iterator[bytes]:
    """Gradients, parameters, buffers and optimizer states, bit by bit."""
    for module in job.modules:
        for parameter in module.parameters():
            yield bits(parameter)
            if parameter.grad is not None:
                yield bits(parameter.grad)
        for buffer in module.buffers():
            yield bits(buffer)


def run(make: Callable[[], Job], steps: int) -> list[bytes]:
    """Train for some steps: each loss, and gradients, buffers and weights after each step."""
    seed(0)
    job = make()
    seed(1)
    found = []
    for i in range(steps):
        loss = job.step(i)
        found.append(bits(loss))
        del loss
        found.extend(outcome(job))
    found.append(bits(torch.rand(3)))
    return found


def simple(model: nn.Module, loss_of: Callable[[nn.Module, int], torch.Tensor], lr: float = 1e-3) -> Job:
    """The usual loop."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def step(i: int) -> torch.Tensor:
        loss = loss_of(model, i)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Job(step, [model], [optimizer])


def mlp() -> Job:
    """Dense layers with GELU, layer norm and dropout."""
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(0.1)) for _ in range(5)]
    model = nn.Sequential(*blocks, nn.Linear(128, 10))
    return simple(model, lambda m, _: F.cross_entropy(m(torch.randn(512, 128)), torch.randint(0, 10, (512,))))


def cnn() -> Job:
    """Convolutions, batch norm, in-place ReLU, max-pool indices, dropout."""

    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]

    model = nn.Sequential(
        *block(3, 16), *block(16, 16), nn.MaxPool2d(2), *block(16, 32), nn.Dropout2d(0.1), *block(32, 32), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 64, 10),
    )
    return simple(model, lambda m, _: F.cross_entropy(m(torch.randn(16, 3, 32, 32)), torch.randint(0, 10, (16,))))


class Tagger(nn.Module):
    """LSTM over sequences, a dense layer per step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 64, num_layers=2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.rnn(x)[0]))


def lstm() -> Job:
    """Two LSTM layers, a dense layer per step, mean squared error."""
    return simple(Tagger(), lambda m, _: F.mse_loss(m(torch.randn(16, 60, 16)), torch.randn(16, 60, 1)))


class Seq2Seq(nn.Module):
    """GRU encoder over a packed sequence, two decoder cells with additive attention between, a readout over the vocabulary."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, embedding)
        self.target = nn.Embedding(vocabulary, embedding)
        self.encoder = nn.GRU(embedding, hidden, bidirectional=True)
        self.first = nn.GRUCell(embedding, hidden)
        self.second = nn.GRUCell(2 * hidden, hidden)
        self.keys = nn.Linear(2 * hidden, hidden)
        self.query = nn.Linear(hidden, hidden)
        self.score = nn.Linear(hidden, 1)
        self.readout = nn.Linear(embedding + hidden + 2 * hidden, embedding)
        self.words = nn.Linear(embedding, vocabulary)

    def forward(self, source: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.source(source), lengths, enforce_sorted=False)
        memory, last = self.encoder(packed)
        memory, _ = nn.utils.rnn.pad_packed_sequence(memory)
        keys = self.keys(memory)
        mask = (torch.arange(memory.shape[0])[:, None] >= lengths[None, :])[..., None]
        state = last[0]
        outputs = []
        for step in range(target.shape[0]):
            embedded = self.target(target[step])
            state = self.first(embedded, state)
            scores = self.score(torch.tanh(keys + self.query(state))).masked_fill(mask, -1e9)
            context = (torch.softmax(scores, 0) * memory).sum(0)
            state = self.second(context, state)
            outputs.append(self.words(torch.tanh(self.readout(torch.cat([embedded, state, context], -1)))))
        return torch.stack(outputs)


def gru_seq2seq() -> Job:
    """The seq2seq with attention, small."""
    model = Seq2Seq(200, 24, 48)

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        lengths = torch.randint(6, 13, (12,))
        lengths[0] = 12
        source, target = torch.randint(0, 200, (12, 12)), torch.randint(0, 200, (13, 12))
        logits = m(source, lengths, target[:-1])
        return F.cross_entropy(logits.flatten(0, 1), target[1:].flatten(), reduction="sum") / 12

    return simple(model, loss_of)


class Attention(nn.Module):
    """Causal self-attention, written out or by ``scaled_dot_product_attention``."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(c, dim=2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        else:
            scores = q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
            y = self.drop(torch.softmax(scores, -1)) @ v
        return self.drop(self.out(y.transpose(1, 2).reshape(b, t, c)))


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, *, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, fused=fused)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small GPT with tied weights."""

    def __init__(self, *, fused: bool, vocabulary: int = 256, width: int = 64, layers: int = 4, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList([Block(width, 4, fused=fused) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language_loss(m: nn.Module, batch: int = 8, length: int = 64, vocabulary: int = 256) -> torch.Tensor:
    """Next-token loss on random ids."""
    ids = torch.randint(0, vocabulary, (batch, length + 1))
    return F.cross_entropy(m(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def gpt_eager() -> Job:
    """GPT with dropout, tied weights, attention written out."""
    return simple(GPT(fused=False), lambda m, _: language_loss(m))


def gpt_sdpa() -> Job:
    """The same with scaled_dot_product_attention."""
    return simple(GPT(fused=True), lambda m, _: language_loss(m))


# --- transformers, random weights ------------------------------------------------------------------------------------


def hf_gpt2() -> Job:
    """GPT-2 as the package ships it."""
    import transformers as hf

    config = hf.GPT2Config(vocab_size=300, n_positions=64, n_embd=64, n_layer=3, n_head=4)
    return _hf_language(hf.GPT2LMHeadModel(config), 300)


def hf_llama() -> Job:
    """Llama as the package ships it."""
    import transformers as hf

    config = hf.LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
                            num_attention_heads=4, num_key_value_heads=2)
    return _hf_language(hf.LlamaForCausalLM(config), 300)


def hf_mamba() -> Job:
    """Mamba as the package ships it (the slow path, in torch operators)."""
    import transformers as hf

    config = hf.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=8)
    return _hf_language(hf.MambaForCausalLM(config), 100, batch=4, length=16)


def _hf_language(model: nn.Module, vocabulary: int, batch: int = 8, length: int = 48) -> Job:
    model.train()

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        ids = torch.randint(0, vocabulary, (batch, length))
        return m(input_ids=ids, labels=ids).loss

    return simple(model, loss_of)


def hf_bert() -> Job:
    """BERT as the package ships it."""
    import transformers as hf

    config = hf.BertConfig(vocab_size=300, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
                           max_position_embeddings=64)
    return _hf_language(hf.BertForMaskedLM(config), 300)


def hf_t5() -> Job:
    """T5 as the package ships it."""
    import transformers as hf

    config = hf.T5Config(vocab_size=300, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
    model = hf.T5ForConditionalGeneration(config)
    model.train()

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        return m(input_ids=torch.randint(1, 300, (8, 32)), labels=torch.randint(1, 300, (8, 24))).loss

    return simple(model, loss_of)


def hf_vit() -> Job:
    """ViT as the package ships it."""
    import transformers as hf

    config = hf.ViTConfig(hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, image_size=32,
                          patch_size=4, num_labels=10, hidden_dropout_prob=0.1)
    return _hf_image(hf.ViTForImageClassification(config))


def hf_resnet() -> Job:
    """ResNet as the package ships it."""
    import transformers as hf

    config = hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 2, 1, 1], num_labels=10)
    return _hf_image(hf.ResNetForImageClassification(config))


def hf_convnext() -> Job:
    """ConvNeXt with drop-path as the package ships it."""
    import transformers as hf

    config = hf.ConvNextConfig(hidden_sizes=[16, 32, 64, 64], depths=[1, 2, 1, 1], drop_path_rate=0.3, num_labels=10)
    return _hf_image(hf.ConvNextForImageClassification(config))


def _hf_image(model: nn.Module) -> Job:
    model.train()

    def loss_of(m: nn.Module, _: int) -> torch.Tensor:
        size = 32 if "ViT" in type(m).__name__ else 64
        return m(pixel_values=torch.randn(8, 3, size, size), labels=torch.randint(0, 10, (8,))).loss

    return simple(model, loss_of)


OWN: dict[str, Callable[[], Job]] = {
    f.__name__: f for f in (mlp, cnn, lstm, gru_seq2seq, gpt_eager, gpt_sdpa)
}
TRANSFORMERS: dict[str, Callable[[], Job]] = {
    f.__name__: f for f in (hf_gpt2, hf_bert, hf_llama, hf_t5, hf_vit, hf_resnet, hf_convnext, hf_mamba)
}
MODELS = {**OWN, **TRANSFORMERS}
