"""TRL: supervised fine-tuning with SFTTrainer's defaults, on texts of many lengths."""

import random
import tempfile

from datasets import Dataset
from digest import digest
from offline_tokenizer import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

import torch

torch.manual_seed(0)
chance = random.Random(0)
words = tokenizer()
texts = [" ".join(f"w{chance.randrange(1000)}" for _ in range(chance.randrange(40, 200))) for _ in range(96)]
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), hidden_size=192, intermediate_size=512, num_hidden_layers=4,
                                     num_attention_heads=6, max_position_embeddings=512, pad_token_id=0))


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(state.global_step, logs["loss"], flush=True)


with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model=model, processing_class=words, train_dataset=Dataset.from_dict({"text": texts}), callbacks=[Told()],
        args=SFTConfig(output_dir=folder, per_device_train_batch_size=8, max_steps=12, logging_steps=1, report_to=[], use_cpu=True,
                       save_strategy="no", disable_tqdm=True, bf16=False, dataloader_pin_memory=False),
    )
    trainer.train()
print(digest(model))
