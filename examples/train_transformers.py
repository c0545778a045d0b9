"""Fine-tunes a tiny Hugging Face model with its Trainer on the GPU; needs the transformers package.

ditorch run examples/train_transformers.py --steps 5
"""

import argparse
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=10)
args = parser.parse_args()


class Counting(Dataset):
    """Sequences that count upwards: a stand-in for a tokenized corpus."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        ids = (torch.arange(32) + index) % 64
        return {"input_ids": ids, "labels": ids}


config = GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4)
model = GPT2LMHeadModel(config)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        bf16=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Counting())
    result = trainer.train()
assert next(model.parameters()).device.type == "cuda"
print(f"trained on {arguments.device}: loss {result.training_loss:.3f}")
