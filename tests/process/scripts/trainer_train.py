"""Train a tiny random GPT-2 with the Hugging Face Trainer."""

from __future__ import annotations

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

STEPS = 8
BATCH = 8
LENGTH = 64
WORDS = 256


class Sentences(Dataset):
    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main(path: str) -> None:
    set_seed(0)
    torch.use_deterministic_algorithms(True)
    config = GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=96, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, use_cpu=True, report_to="none", save_strategy="no", seed=0, max_steps=STEPS,
            per_device_train_batch_size=BATCH, logging_strategy="steps", logging_steps=1, learning_rate=1e-3,
            disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=Sentences(STEPS * BATCH))
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.save({"losses": losses, "weights": model.state_dict()}, path)


if __name__ == "__main__":
    main(sys.argv[1])
