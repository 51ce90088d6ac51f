"""TRL: group-relative policy optimization: answers are sampled by the model, and rewarded by a function."""

import tempfile

import torch
from datasets import Dataset
from digest import digest
from offline_tokenizer import tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

torch.manual_seed(0)
words = tokenizer()
words.padding_side = "left"
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), hidden_size=128, intermediate_size=344, num_hidden_layers=3,
                                     num_attention_heads=4, max_position_embeddings=256, pad_token_id=0, eos_token_id=3))


def reward(completions, **kwargs):
    return [float(len(set(text.split()))) for text in completions]


class Told(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(state.global_step, logs["loss"], logs["reward"], flush=True)


with tempfile.TemporaryDirectory() as folder:
    trainer = GRPOTrainer(
        model=model, processing_class=words, reward_funcs=reward, callbacks=[Told()],
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1} w{i + 2}" for i in range(32)]}),
        args=GRPOConfig(output_dir=folder, per_device_train_batch_size=8, num_generations=4, max_completion_length=48, max_steps=6,
                        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, bf16=False, beta=0.0,
                        dataloader_pin_memory=False),
    )
    trainer.train()
print(digest(model))
