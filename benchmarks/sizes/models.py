"""A training script for many models, its sizes set by options: `models.py NAME --batch N [--side S] [--length L]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from torch.nn import functional as F

import torch
from torch import nn

Loss = Callable[[], torch.Tensor]
Made = tuple[nn.Module, Loss]


def _images(model: nn.Module, given: argparse.Namespace, side: int = 32, classes: int = 10) -> Made:
    side = given.side or side
    return model, lambda: F.cross_entropy(
        model(torch.randn(given.batch, 3, side, side)), torch.randint(classes, (given.batch,))
    )


def mlp(given: argparse.Namespace) -> Made:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, lambda: F.cross_entropy(model(torch.randn(given.batch, 784)), torch.randint(10, (given.batch,)))


def cnn(given: argparse.Namespace) -> Made:
    def block(a: int, b: int) -> list[nn.Module]:
        return [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]

    return _images(
        nn.Sequential(
            *block(3, 32),
            *block(32, 32),
            nn.MaxPool2d(2),
            *block(32, 64),
            *block(64, 64),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(1024, 10),
        ),
        given,
    )


def unet(given: argparse.Namespace) -> Made:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
            self.up, self.out = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(32, 3, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = F.relu(self.a(x))
            return self.out(torch.cat([a, F.relu(self.up(F.relu(self.b(F.max_pool2d(a, 2)))))], 1))

    model, side = Net(), given.side or 64
    return model, lambda: F.mse_loss(model(torch.randn(given.batch, 3, side, side)), torch.randn(given.batch, 3, side, side))


def lstm(given: argparse.Namespace) -> Made:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.LSTM(16, 64, 2, batch_first=True), nn.Linear(64, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.rnn(x)[0]))

    model, length = Net(), given.length or 50
    return model, lambda: F.mse_loss(model(torch.randn(given.batch, length, 16)), torch.randn(given.batch, length, 1))


def gru(given: argparse.Namespace) -> Made:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = nn.GRU(24, 48, bidirectional=True), nn.Linear(96, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.rnn(x)[0][-1])

    model, length = Net(), given.length or 40
    return model, lambda: F.cross_entropy(model(torch.randn(length, given.batch, 24)), torch.randint(5, (given.batch,)))


def encoder(given: argparse.Namespace) -> Made:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, length = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), given.length or 32
    return model, lambda: model(torch.randn(given.batch, length, 64)).square().mean()


def bag(given: argparse.Namespace) -> Made:
    model = nn.Sequential(nn.EmbeddingBag(1000, 64), nn.Linear(64, 4))
    return model, lambda: F.cross_entropy(model(torch.randint(1000, (given.batch, 30))), torch.randint(4, (given.batch,)))


def autoencoder(given: argparse.Namespace) -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 4, 2, 1),
        nn.GELU(),
        nn.Conv2d(16, 32, 4, 2, 1),
        nn.GELU(),
        nn.ConvTranspose2d(32, 16, 4, 2, 1),
        nn.GELU(),
        nn.ConvTranspose2d(16, 3, 4, 2, 1),
    )
    side = given.side or 32
    return model, lambda: F.mse_loss(model(x := torch.randn(given.batch, 3, side, side)), x)


def mixer(given: argparse.Namespace) -> Made:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch, self.tokens, self.channels = nn.Conv2d(3, 64, 4, 4), nn.Linear(64, 64), nn.Linear(64, 64)
            self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.patch(x).flatten(2).transpose(1, 2)
            y = y + F.gelu(self.tokens(self.norm(y).transpose(1, 2))).transpose(1, 2)
            return self.out((y + F.gelu(self.channels(self.norm(y)))).mean(1))

    given.side = 32
    return _images(Net(), given)


def conv1d(given: argparse.Namespace) -> Made:
    model = nn.Sequential(
        nn.Conv1d(4, 32, 7, padding=3),
        nn.GroupNorm(4, 32),
        nn.SiLU(),
        nn.Conv1d(32, 32, 7, padding=3, dilation=1),
        nn.AdaptiveMaxPool1d(8),
        nn.Flatten(),
        nn.Linear(256, 3),
    )
    length = given.length or 200
    return model, lambda: F.cross_entropy(model(torch.randn(given.batch, 4, length)), torch.randint(3, (given.batch,)))


def _hf(make: Callable[..., tuple[nn.Module, int]], given: argparse.Namespace) -> Made:
    import transformers as hf

    model, vocabulary = make(hf)
    model.train()
    length = given.length or 32

    def loss() -> torch.Tensor:
        ids = torch.randint(vocabulary, (given.batch, length))
        found: torch.Tensor = model(input_ids=ids, labels=ids).loss
        return found

    return model, loss


def gpt2(given: argparse.Namespace) -> Made:
    return _hf(
        lambda hf: (hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=500, n_positions=512, n_embd=64, n_layer=3, n_head=4)), 500),
        given,
    )


def gpt2_eager(given: argparse.Namespace) -> Made:
    return _hf(
        lambda hf: (
            hf.GPT2LMHeadModel(
                hf.GPT2Config(vocab_size=500, n_positions=512, n_embd=64, n_layer=3, n_head=4, attn_implementation="eager")
            ),
            500,
        ),
        given,
    )


def bert(given: argparse.Namespace) -> Made:
    return _hf(
        lambda hf: (
            hf.BertForMaskedLM(
                hf.BertConfig(
                    vocab_size=500, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
                )
            ),
            500,
        ),
        given,
    )


def llama(given: argparse.Namespace) -> Made:
    return _hf(
        lambda hf: (
            hf.LlamaForCausalLM(
                hf.LlamaConfig(
                    vocab_size=500,
                    hidden_size=64,
                    intermediate_size=128,
                    num_hidden_layers=3,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                )
            ),
            500,
        ),
        given,
    )


def t5(given: argparse.Namespace) -> Made:
    return _hf(
        lambda hf: (
            hf.T5ForConditionalGeneration(
                hf.T5Config(vocab_size=500, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
            ),
            500,
        ),
        given,
    )


def _hf_images(make: Callable[..., nn.Module], given: argparse.Namespace) -> Made:
    import transformers as hf

    model = make(hf)
    model.train()
    side = given.side or 64

    def loss() -> torch.Tensor:
        found: torch.Tensor = model(
            pixel_values=torch.randn(given.batch, 3, side, side), labels=torch.randint(10, (given.batch,))
        ).loss
        return found

    return model, loss


def vit(given: argparse.Namespace) -> Made:
    given.side = 64
    return _hf_images(
        lambda hf: hf.ViTForImageClassification(
            hf.ViTConfig(
                hidden_size=64,
                num_hidden_layers=3,
                num_attention_heads=4,
                intermediate_size=128,
                image_size=64,
                patch_size=8,
                num_labels=10,
            )
        ),
        given,
    )


def resnet(given: argparse.Namespace) -> Made:
    return _hf_images(
        lambda hf: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 64], depths=[1, 2, 1, 1], num_labels=10)
        ),
        given,
    )


def convnext(given: argparse.Namespace) -> Made:
    return _hf_images(
        lambda hf: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(hidden_sizes=[16, 32, 64, 64], depths=[1, 2, 1, 1], num_labels=10)
        ),
        given,
    )


def mobilenet(given: argparse.Namespace) -> Made:
    return _hf_images(
        lambda hf: hf.MobileNetV2ForImageClassification(hf.MobileNetV2Config(num_labels=10, depth_multiplier=0.35)), given
    )


MODELS = {
    f.__name__: f
    for f in (
        mlp,
        cnn,
        unet,
        lstm,
        gru,
        encoder,
        bag,
        autoencoder,
        mixer,
        conv1d,
        gpt2,
        gpt2_eager,
        bert,
        llama,
        t5,
        vit,
        resnet,
        convnext,
        mobilenet,
    )
}


def main() -> None:
    """Train for some steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--side", type=int, default=0)
    parser.add_argument("--length", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    torch.manual_seed(0)
    model, loss_of = MODELS[given.name](given)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(given.steps):
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        del loss


if __name__ == "__main__":
    main()
