"""How low recompute and offload alone can take a step, model by model, and what sets the floor.

Each model trains plainly for some steps; then under nine tenths of what a step adds, from which its unit's proven floor and
the lowest plan are read; then under that lowest plan's peak, to see it held. Shares are of the plain peak above what is
resident (parameters, buffers, optimizer states). Gradients are shown apart: no plan moves them, and the smaller the batch, the
more they weigh. The last column is the lowest plan where layers may run in pieces.

Prints a table and, with ``--json FILE``, writes every figure with the machine's name.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

from budget import Layers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from steps import Step, image, language

import lowtide
import torch
from lowtide.base.lever_catalogue import SLICES, SPLIT_OPS, UPDATE
from lowtide.base.units import format_bytes
from lowtide.runtime.device.heap_meter import counters
from process import machine, with_counter
from torch import nn

WARM = 3
SETTLING = 4
VOCABULARY = 1024


def gpt2() -> Step:
    """GPT-2, 12 layers of 128."""
    import transformers as hf

    config = hf.GPT2Config(vocab_size=VOCABULARY, n_positions=128, n_embd=128, n_layer=12, n_head=4)
    return language(hf.GPT2LMHeadModel(config), VOCABULARY, 16, 128)


def bert() -> Step:
    """BERT, 12 layers of 128, attention written out."""
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=128, num_hidden_layers=12, num_attention_heads=4, intermediate_size=512,
        attn_implementation="eager",
    )
    return language(hf.BertForMaskedLM(config), VOCABULARY, 16, 128)


def llama() -> Step:
    """Llama, 12 layers of 128."""
    import transformers as hf

    config = hf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=352, num_hidden_layers=12, num_attention_heads=4
    )
    return language(hf.LlamaForCausalLM(config), VOCABULARY, 16, 128)


def t5() -> Step:
    """T5, 6 and 6 layers of 128."""
    import transformers as hf

    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=512, num_layers=6, num_heads=4, decoder_start_token_id=0
    )
    return language(hf.T5ForConditionalGeneration(config), VOCABULARY, 16, 96)


def mamba() -> Step:
    """Mamba, 8 layers of 64, in torch's operators."""
    import transformers as hf

    config = hf.MambaConfig(vocab_size=VOCABULARY // 4, hidden_size=64, num_hidden_layers=8, state_size=16)
    return language(hf.MambaForCausalLM(config), VOCABULARY // 4, 8, 32)


def vit() -> Step:
    """ViT, 12 layers of 192."""
    import transformers as hf

    config = hf.ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=64, patch_size=8,
        num_labels=10,
    )
    return image(hf.ViTForImageClassification(config), 32, 64)


def resnet() -> Step:
    """ResNet-50 as it is."""
    import transformers as hf

    return image(hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=10)), 32, 96)


def convnext() -> Step:
    """ConvNeXt, 16 layers of 48 to 384, with drop-path."""
    import transformers as hf

    config = hf.ConvNextConfig(hidden_sizes=[48, 96, 192, 384], depths=[3, 3, 7, 3], drop_path_rate=0.1, num_labels=10)
    return image(hf.ConvNextForImageClassification(config), 32, 96)


def cnn() -> Step:
    """Nine convolutions with batch norm and ReLU in place."""
    widths = (3, 32, 32, 32, 64, 64, 64, 128, 128, 128)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(zip(widths, widths[1:], strict=False)):
        layers += [nn.Conv2d(a, b, 3, padding=1, stride=1 + (i in (3, 6))), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    pictures = (16, 3, 64, 64)
    return Step(model, lambda: nn.functional.cross_entropy(model(torch.randn(pictures)), torch.randint(0, 10, (16,))))


def lstm() -> Step:
    """Two-layer LSTM: its values are whole layers."""
    model = Layers()
    return Step(model, lambda: nn.functional.mse_loss(model(torch.randn(64, 100, 64)), torch.randn(64, 100, 1)))


MODELS = {f.__name__: f for f in (gpt2, bert, llama, t5, mamba, vit, resnet, convnext, cnn, lstm)}


def measure(name: str) -> dict[str, Any]:
    """One model."""
    gc.collect()
    counter = counters()
    assert counter is not None
    outside = counter.tensor_live
    torch.manual_seed(0)
    step = MODELS[name]()
    for _ in range(WARM):
        step()
    resident = counter.tensor_live - outside
    counter.tensor_peak = counter.tensor_live
    step()
    plain = counter.tensor_peak - outside

    def budgeted(budget: int, allow: tuple[str, ...] = ()) -> tuple[int, Any]:
        with lowtide.budget(outside + budget, allow=allow, without=(UPDATE, SLICES)) as run:
            for _ in range(SETTLING):
                step()
        return run.outcome.steps[-1].peak_bytes - outside, run.outcome.plan

    _, plan = budgeted(resident + int(0.9 * (plain - resident)))
    lowest, bound = plan.lowest_peak_bytes - outside, plan.bound_peak_bytes - outside
    held, _ = budgeted(lowest + (64 << 10))
    _, pieces = budgeted(resident + int(0.9 * (plain - resident)), (SPLIT_OPS,))
    return {
        "model": name, "what": (MODELS[name].__doc__ or "").rstrip("."), "plain_peak_bytes": plain, "resident_bytes": resident,
        "gradient_bytes": step.gradient_bytes, "bound_bytes": bound, "lowest_bytes": lowest, "held_bytes": held,
        "pieces_bytes": pieces.lowest_peak_bytes - outside,
    }


def row(found: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    added = found["plain_peak_bytes"] - found["resident_bytes"]

    def share(key: str) -> str:
        return f"{(found[key] - found['resident_bytes']) / added:.0%}"

    return (
        found["what"], format_bytes(added), f"{found['gradient_bytes'] / added:.0%}",
        share("bound_bytes"), share("lowest_bytes"), share("held_bytes"), share("pieces_bytes"),
    )


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("--json")
    options.add_argument("--models", default=",".join(MODELS))
    given = options.parse_args()
    with_counter()
    names = given.models.split(",")
    with Progress(transient=True) as progress:
        results = [measure(name) for name in progress.track(names, description="measuring")]
    table = Table(title="How low recompute and offload alone go")
    for column in ("model", "a step adds", "gradients", "proven floor", "lowest plan", "held", "with split-ops"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        table.add_row(*row(result))
    Console(width=127).print(table)
    if given.json:
        Path(given.json).write_text(json.dumps({"machine": machine(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
