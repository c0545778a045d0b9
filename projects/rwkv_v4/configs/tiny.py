"""A model for a laptop on the bundled text: the whole trainer in half a minute on two cores."""

from projects.rwkv_v4.config import get_config

_honest = get_config("configs/enwik8.py")

model = {**_honest["model"], "n_layer": 2, "n_embd": 64, "head_qk": 32}
data = {**_honest["data"], "path": "sample"}
optim = _honest["optim"]
train = {
    **_honest["train"],
    "output_dir": "output/tiny",
    "ctx_len": 64,
    "train_iter": 300,
    "amp": None,
    "checkpoint": {"period": 100, "keep": 2},
    "evaluation": {**_honest["train"]["evaluation"], "max_batches": 10},
}
