"""transformers: the Trainer with its defaults, on a BERT classifier and texts that are padded batch by batch."""

import random
import tempfile

from datasets import Dataset
from digest import digest
from offline_tokenizer import tokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import torch

torch.manual_seed(0)
chance = random.Random(0)
words = tokenizer()
texts = [" ".join(f"w{chance.randrange(1000)}" for _ in range(chance.randrange(20, 160))) for _ in range(128)]
data = Dataset.from_dict({"text": texts, "label": [chance.randrange(3) for _ in texts]})
data = data.map(lambda row: words(row["text"], truncation=True, max_length=160), remove_columns=["text"])
model = BertForSequenceClassification(BertConfig(vocab_size=len(words), hidden_size=256, num_hidden_layers=4, num_attention_heads=8,
                                                 intermediate_size=1024, num_labels=3))


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(state.global_step, logs["loss"], logs["grad_norm"], flush=True)


with tempfile.TemporaryDirectory() as folder:
    Trainer(
        model=model, train_dataset=data, data_collator=DataCollatorWithPadding(words), callbacks=[Told()],
        args=TrainingArguments(output_dir=folder, logging_steps=1, max_steps=12, use_cpu=True, report_to=[], save_strategy="no",
                               disable_tqdm=True, dataloader_pin_memory=False),
    ).train()
print(digest(model))
