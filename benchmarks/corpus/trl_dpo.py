"""TRL: direct preference optimization with DPOTrainer: two answers a prompt, and a reference model."""

import random
import tempfile

from datasets import Dataset
from digest import digest
from offline_tokenizer import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer

import torch

torch.manual_seed(0)
chance = random.Random(0)
words = tokenizer()


def text(least, most):
    return " ".join(f"w{chance.randrange(1000)}" for _ in range(chance.randrange(least, most)))


rows = [{"prompt": text(20, 40), "chosen": text(40, 120), "rejected": text(40, 120)} for _ in range(64)]
config = LlamaConfig(vocab_size=len(words), hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
                     max_position_embeddings=512, pad_token_id=0)
model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(state.global_step, logs["loss"], logs.get("rewards/margins"), flush=True)


with tempfile.TemporaryDirectory() as folder:
    trainer = DPOTrainer(
        model=model, ref_model=reference, processing_class=words, train_dataset=Dataset.from_list(rows), callbacks=[Told()],
        args=DPOConfig(output_dir=folder, per_device_train_batch_size=6, max_steps=10, logging_steps=1, report_to=[], use_cpu=True,
                       save_strategy="no", disable_tqdm=True, bf16=False, dataloader_pin_memory=False, gradient_checkpointing=False),
    )
    trainer.train()
print(digest(model))
