"""The honest run: random slices of enwik8, a causal copy head, the model's own initialisation."""

import torch

from projects.rwkv_v4.config import LazyCall
from projects.rwkv_v4.data import CharCorpus
from projects.rwkv_v4.model import GPT

model = LazyCall(GPT)(
    vocab_size=None,  # a number, or null: as many as the text has characters
    ctx_len="${train.ctx_len}",
    n_layer=6,
    n_embd=1024,
    head_qk=256,
    causal_copy=True,
    init="rwkv",
    logit_pull=1e-4,
    seed="${train.seed}",
)

data = LazyCall(CharCorpus)(path=None, ctx_len="${train.ctx_len}", same_slice=False, held_out=0.05, epoch_length=None)

optim = LazyCall(torch.optim.Adam)(lr="${train.lr}", betas=[0.9, 0.99], eps=1e-8)

train = {
    "output_dir": "output/enwik8",
    "seed": 0,
    "ctx_len": 1024,
    "train_iter": 10000,
    "train_epoch": 0,  # trains for so many passes at least: data.epoch_length samples, or the whole text
    "warmup_ratio": 0,  # of the iterations, in which the schedulers named Warmup… begin
    "stop_after": None,  # stop after this many iterations, as if interrupted: the schedule is that of train_iter
    "max_seconds": None,  # stop after this much training time, evaluation not counted
    "global_batch_size": 8,
    "lr": 8e-4,
    "final_lr": 1e-5,  # reached exponentially at train_iter; null keeps lr
    "scheduler": None,  # instead of final_lr: {"name": "StepLR", "step_size": 1000, "gamma": 0.5}, see schedules.py
    "log_period": 20,
    "loss_window": 20,  # the printed loss is a median over this many iterations
    "amp": "bf16",  # bf16 or null
    "deterministic": False,
    "compile": None,  # true, false, or null: where the device is a GPU
    "compile_mode": "default",
    "graph_debug": -1,  # 1 lists modules and parameters, 2 operators too, of a forward pass; 3 backward and memory
    "load_weight": None,
    "checkpoint": {"period": 1000, "keep": 2},
    "evaluation": {"period": 0, "split": "valid", "batch_size": 8, "max_batches": None, "at_end": True},
    "dist": {"strategy": "ddp"},  # with several ranks: ddp, fsdp or tensor
}
