"""The run of the training log with its defects on purpose: it memorises one slice and looks at what it predicts.

Every sample is characters 1 to 1025 of the corpus, the copy head sees the future, the weights start from
Xavier-normal, and the printed loss is a median over the last 200 iterations. docs/rwkv.md explains it.
"""

from projects.rwkv_v4.config import get_config

_honest = get_config("configs/enwik8.py")

model = {**_honest["model"], "causal_copy": False, "init": "xavier", "logit_pull": 0.0}
data = {**_honest["data"], "same_slice": True}
optim = {**_honest["optim"], "betas": [0.9, 0.999]}
train = {
    **_honest["train"],
    "output_dir": "output/seed_log",
    "final_lr": None,
    "loss_window": 200,
    "evaluation": {**_honest["train"]["evaluation"], "at_end": False},
}
