"""Configs are the same with and without omegaconf, and mistakes are named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from projects.rwkv_v4.config import Config, ConfigError, LazyCall, get_config

NAMES = ("enwik8", "seed_log", "tiny")
CHANGES = ["train.lr=4e-4", "train.dist.strategy=fsdp", "model.n_layer=3", "optim.betas=[0.8,0.9]", "train.amp=null"]


def plain(name: str) -> Config:
    return Config(get_config(f"configs/{name}.py"), library=None)


def test_override_reaches_what_refers_to_it() -> None:
    config = plain("enwik8")
    config.override(CHANGES)
    assert config.optim.lr == 4e-4
    assert config.train.dist.strategy == "fsdp"
    assert config.model.n_layer == 3
    assert config.train.amp is None
    optimizer = config.build("optim", params=[torch.zeros(1)])
    assert isinstance(optimizer, torch.optim.Adam)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)


@pytest.mark.skipif(importlib.util.find_spec("omegaconf") is None, reason="omegaconf is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_the_built_in_subset_does_what_omegaconf_does(name: str) -> None:
    library, own = Config(get_config(f"configs/{name}.py")), plain(name)
    for config in (library, own):
        config.override(CHANGES)
    assert library.plain() == own.plain()
    assert library.yaml() == own.yaml()
    assert type(library.build("data")) is type(own.build("data"))


@pytest.mark.parametrize("name", NAMES)
def test_yaml_reads_back(name: str) -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(plain(name).yaml()) == plain(name).plain()


def test_the_logged_run_differs_from_the_honest_one_in_its_defects_only() -> None:
    honest, logged = plain("enwik8").plain(), plain("seed_log").plain()
    differing = {f"{s}.{k}" for s in honest for k in honest[s] if honest[s][k] != logged[s][k]}
    assert differing == {
        "model.causal_copy",
        "model.init",
        "model.logit_pull",
        "data.same_slice",
        "optim.betas",
        "train.output_dir",
        "train.final_lr",
        "train.loss_window",
        "train.evaluation",
    }


def test_mistakes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'train.lrr' is not in the configuration; did you mean train.lr"):
        plain("tiny").override(["train.lrr=1"])
    with pytest.raises(ConfigError, match=r"'train.lr': an override is key=value"):
        plain("tiny").override(["train.lr"])
    with pytest.raises(ConfigError, match=r"no config file nothing.py; .*enwik8.py"):
        get_config("nothing.py")
    (tmp_path / "half.py").write_text("model = {}\ntrain = {}\n")
    with pytest.raises(ConfigError, match=r"defines no data and no optim"):
        get_config(tmp_path / "half.py")
    with pytest.raises(ConfigError, match=r"no 'speed' here"):
        _ = plain("tiny").train.speed


def test_lazy_call_writes_the_call_down() -> None:
    assert LazyCall(torch.optim.Adam)(lr=1) == {"_target_": "torch.optim.adam.Adam", "lr": 1}
