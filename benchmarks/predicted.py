"""Does predicted extra time come true? Plain steps and steps at 75, 60, 50 and 35 % of the plain peak, in turns, of 20 models.

    python benchmarks/predicted.py --json benchmarks/results/predicted.json

A budget is held for a few steps until its plan has been timed, then for those that are measured. Predicted is what the plan
in force at the end says; "told" is what the run itself measured and prints beside it. Measured is the median step less the
median plain step, within each turn; its error is seen in the plain steps, which run twice. Budgets below the lowest plan are
left out. The heap counter must be preloaded; the script starts itself again with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import budget as models
import transformers as hf
from rich.console import Console
from rich.progress import track
from rich.table import Table
from steps import Step, image, language

import torch
from lowtide.base.errors import BudgetError
from process import in_turns, machine, with_counter
from torch import nn

SHARES = (0.75, 0.6, 0.5, 0.35)
"""Budgets, of the plain peak."""
CLOSE, SMALL = 0.2, 0.01
"""A prediction comes true if it differs by at most this share of the extra time, or by this share of the step."""


def _text(config: Any, kind: Any, batch: int = 4, length: int = 128) -> Step:
    return language(kind(config), config.vocab_size, batch, length)


def _seq2seq(model: nn.Module, vocabulary: int) -> Step:
    def loss() -> torch.Tensor:
        ids = torch.randint(2, vocabulary, (4, 96))
        return model(input_ids=ids, labels=ids).loss

    return Step(model.train(), loss)


def _small(**more: Any) -> dict[str, Any]:
    usual = {"vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8}
    return usual | {"intermediate_size": 1024} | more


def _whisper() -> Step:
    config = hf.WhisperConfig(
        vocab_size=2048, d_model=192, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6, decoder_attention_heads=6,
        encoder_ffn_dim=768, decoder_ffn_dim=768, max_source_positions=200, max_target_positions=64, pad_token_id=0,
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = hf.WhisperForConditionalGeneration(config).train()
    return Step(
        model, lambda: model(input_features=torch.randn(4, 80, 400), labels=torch.randint(3, 2048, (4, 48))).loss
    )


class _Mixer(nn.Module):
    """An MLP mixer with as many tokens as channels."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(256) for _ in range(12))
        self.mixers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 256)) for _ in range(12)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (batch, 256, 256) to the same shape."""
        for k, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
            mixed = mixer(norm(x).transpose(1, 2)).transpose(1, 2) if k % 2 else mixer(norm(x))
            x = x + mixed
        return x


class _UNet(nn.Module):
    """Three scales, two convolutions with batch norm at each, skips between."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 16, 32, 64)
        self.down = nn.ModuleList(self._block(a, b) for a, b in zip(widths[:-1], widths[1:], strict=True))
        self.up = nn.ModuleList(self._block(a, b) for a, b in ((64, 32), (96, 16), (48, 16)))
        self.last = nn.Conv2d(16, 1, 1)

    @staticmethod
    def _block(a: int, b: int) -> nn.Module:
        first = (nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        return nn.Sequential(*first, nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pictures (batch, 3, side, side) to one channel."""
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        for up in self.up:
            x = nn.functional.interpolate(up(x), scale_factor=2)
            x = torch.cat([x, skips.pop()], 1) if len(skips) > 1 else x
        return self.last(x)


def _squares(model: nn.Module, *shape: int) -> Step:
    return Step(model.train(), lambda: model(torch.randn(*shape)).square().mean())


MODELS: dict[str, Callable[[], Step]] = {
    "gpt2": lambda: _text(hf.GPT2Config(vocab_size=4096, n_embd=256, n_layer=6, n_head=8), hf.GPT2LMHeadModel),
    "bert": lambda: _text(hf.BertConfig(**_small(attn_implementation="eager")), hf.BertForMaskedLM),
    "llama": lambda: _text(hf.LlamaConfig(**_small(intermediate_size=704)), hf.LlamaForCausalLM),
    "vit": models.vit,
    "t5": lambda: _seq2seq(
        hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=4096, d_model=256, d_ff=1024, num_layers=4, num_heads=8, d_kv=32, decoder_start_token_id=0
            )
        ),
        4096,
    ),
    "resnet": lambda: image(hf.ResNetForImageClassification(hf.ResNetConfig(num_labels=10)), 4, 128),
    "lstm": models.lstm,
    "opt": lambda: _text(
        hf.OPTConfig(vocab_size=4096, hidden_size=256, ffn_dim=1024, num_hidden_layers=6, num_attention_heads=8),
        hf.OPTForCausalLM,
    ),
    "gpt_neox": lambda: _text(hf.GPTNeoXConfig(**_small()), hf.GPTNeoXForCausalLM),
    "distilbert": lambda: _text(
        hf.DistilBertConfig(vocab_size=4096, dim=256, hidden_dim=1024, n_layers=6, n_heads=8), hf.DistilBertForMaskedLM
    ),
    "albert": lambda: _text(hf.AlbertConfig(**_small(embedding_size=64)), hf.AlbertForMaskedLM),
    "electra": lambda: _text(hf.ElectraConfig(**_small(embedding_size=64)), hf.ElectraForMaskedLM),
    "bart": lambda: _seq2seq(
        hf.BartForConditionalGeneration(hf.BartConfig(
            vocab_size=4096, d_model=256, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=1024, decoder_ffn_dim=1024,
            encoder_attention_heads=8, decoder_attention_heads=8, max_position_embeddings=128,
        )),
        4096,
    ),
    "convnext": lambda: image(
        hf.ConvNextForImageClassification(
            hf.ConvNextConfig(depths=[2, 2, 4, 2], hidden_sizes=[32, 64, 128, 256], num_labels=10)
        ),
        4, 128,
    ),
    "swin": lambda: image(
        hf.SwinForImageClassification(hf.SwinConfig(image_size=128, embed_dim=48, depths=[2, 2, 2], num_heads=[2, 4, 8],
                                                    num_labels=10)), 4, 128,
    ),
    "segformer": lambda: Step(
        (net := hf.SegformerForSemanticSegmentation(hf.SegformerConfig(num_labels=10)).train()),
        lambda: net(pixel_values=torch.randn(2, 3, 128, 128), labels=torch.randint(0, 10, (2, 128, 128))).loss,
    ),
    "whisper": _whisper,
    "mixtral": lambda: _text(
        hf.MixtralConfig(**_small(num_hidden_layers=3, num_key_value_heads=4, num_local_experts=4, intermediate_size=512)),
        hf.MixtralForCausalLM, 2,
    ),
    "mixer": lambda: _squares(_Mixer(), 4, 256, 256),
    "unet": lambda: _squares(_UNet(), 4, 3, 128, 128),
}  # fmt: skip


def _round(subject: models.Subject, budget: int) -> dict[str, Any] | None:
    """A round under a budget; None if it is refused or no plan was followed."""
    try:
        outcome, found = subject.under(budget)
    except BudgetError:
        return None
    plan = outcome.plan
    if plan is None or plan.extra_seconds is None or outcome.steps[-1].policy != "planned":
        return None
    return found | {
        "predicted": plan.extra_seconds / plan.baseline_step_seconds,
        "told": None if plan.measured_extra_seconds is None else plan.measured_extra_seconds / plan.baseline_step_seconds,
    }


def measure(name: str, turns: int) -> dict[str, Any]:
    """All budgets of a model, in turns."""
    gc.collect()
    models.MODELS[name] = MODELS[name]
    subject = models.Subject(name)
    budgets = {f"{share:.0%}": int(share * subject.plain_peak) for share in SHARES}
    rounds: dict[str, Callable[[], dict[str, Any] | None]] = {
        variant: partial(_round, subject, budget) for variant, budget in budgets.items()
    }
    rounds = {variant: round_ for variant, round_ in rounds.items() if round_() is not None}
    rounds |= {"plain": subject.plain, "plain again": subject.plain}
    found: dict[str, list[dict[str, Any]]] = {variant: [] for variant in rounds}
    for variant in in_turns(rounds, turns):
        one = rounds[variant]()
        if one is not None:
            found[variant].append(one)
    return {"model": name, "plain_peak_bytes": subject.plain_peak, "runs": found}


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Per budget: predicted, told and measured extra time as shares of a plain step."""
    plain = [run["seconds"] for run in result["runs"]["plain"]]
    again = [run["seconds"] for run in result["runs"]["plain again"]]
    error = statistics.median(b / a - 1 for a, b in zip(plain, again, strict=True))
    made = []
    for variant, runs in result["runs"].items():
        if variant.startswith("plain") or len(runs) < len(plain):
            continue
        measured = [run["seconds"] / base - 1 for run, base in zip(runs, plain, strict=True)]
        extra, predicted = statistics.median(measured), statistics.median(run["predicted"] for run in runs)
        told = [run["told"] for run in runs if run["told"] is not None]
        made.append({
            "model": result["model"], "budget": variant, "predicted": predicted,
            "told": statistics.median(told) if told else None,
            "measured": extra, "lowest": min(measured), "highest": max(measured), "plain_again": error,
            "true": abs(predicted - extra) <= max(CLOSE * abs(extra), SMALL),
        })  # fmt: skip
    return made


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser()
    options.add_argument("--json", type=Path)
    options.add_argument("--models", nargs="*", default=list(MODELS))
    options.add_argument("--turns", type=int, default=5)
    given = options.parse_args()
    with_counter()
    found = [row for name in track(given.models, "measuring", transient=True) for row in rows(measure(name, given.turns))]
    table = Table(title="Extra time of a step, % of a plain step")
    for column in ("model", "budget", "predicted", "told by the run", "measured", "turns", "plain again", "true"):
        table.add_column(column, justify="right")
    for row in found:
        told = "" if row["told"] is None else f"{row['told']:.1%}"
        table.add_row(
            row["model"], row["budget"], f"{row['predicted']:.1%}", told, f"{row['measured']:.1%}",
            f"{row['lowest']:.1%} to {row['highest']:.1%}", f"{row['plain_again']:.1%}", "yes" if row["true"] else "no",
        )  # fmt: skip
    Console(width=120).print(table)
    true = sum(row["true"] for row in found)
    print(f"{true} of {len(found)} predictions within {CLOSE:.0%} of the extra time or {SMALL:.0%} of the step")
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "turns": given.turns, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
