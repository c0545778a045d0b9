"""A config in the notation of the training log is read as it is, without running it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from projects.rwkv_v4.config import Config, ConfigError, load
from projects.rwkv_v4.libai_config import recognises
from projects.rwkv_v4.schedules import named

STYLE = Path(__file__).with_name("libai_style.txt").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "mine.txt").write_text("some text")
    monkeypatch.setenv("ENWIK8", str(tmp_path / "mine.txt"))


def read(text: str, *options: str) -> Config:
    Path("config.py").write_text(text, encoding="utf-8")
    return load("config.py", list(options))


def changed(old: str, new: str) -> str:
    assert STYLE.count(old) == 1, old
    return STYLE.replace(old, new)


def test_every_option_finds_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = read(STYLE).plain()
    model, data, optim, train = (config[name] for name in ("model", "data", "optim", "train"))
    assert model["_target_"] == "projects.rwkv_v4.model.GPT"
    assert (model["vocab_size"], model["ctx_len"], model["n_layer"], model["n_embd"]) == (6064, 1024, 6, 1024)
    assert (data["ctx_len"], data["epoch_length"], data["held_out"]) == (1024, 9996, 0.0)
    assert data["path"] == str(tmp_path / "mine.txt"), "enwik8 is looked for where this machine has it"
    assert optim["_target_"] == "torch.optim.Adam"
    assert (optim["lr"], optim["betas"]) == (8e-4, [0.9, 0.999])
    assert train["global_batch_size"] == 8, "micro-batch of 4 on two ranks"
    assert (train["train_iter"], train["train_epoch"], train["amp"]) == (10000, 1, "bf16")
    assert train["scheduler"] == {"name": "StepLR", "step_size": 1000, "gamma": 1.0}
    assert (train["evaluation"]["period"], train["evaluation"]["at_end"]) == (0, False)
    assert train["dist"]["strategy"] == "ddp"
    assert train["output_dir"] == "output/like_the_log"


def test_what_means_nothing_here_is_listed_once() -> None:
    notes = read(STYLE, "train.nccl_fusion_max_ops=3").notes
    assert notes[0].startswith("Options without a meaning here, ignored: ")
    assert set(notes[0].split(": ")[1].split(", ")) == {
        "dataloader.train.num_workers",
        "test.path",
        "test.weight_style",
        "train.dist.pipeline_num_layers",
        "train.input_placement_device",
        "train.nccl_fusion_max_ops",
        "train.rdma_enabled",
    }
    assert notes[1].startswith("No text at /nowhere/enwik8: using ")


@pytest.mark.parametrize(
    ("option", "section", "key", "value"),
    [
        ("train.dist.tensor_parallel_size=2", "dist", "strategy", "tensor"),
        ("train.zero_optimization.enabled=true", "dist", "strategy", "fsdp"),
        ("train.amp.enabled=false", None, "amp", None),
        ("graph.enabled=false", None, "compile", False),
        ("train.evaluation.enabled=true", "evaluation", "at_end", True),
        ("train.checkpointer.period=7", "checkpoint", "period", 7),
        ("train.num_accumulation_steps=3", None, "global_batch_size", 24),
        ("train.global_batch_size=6", None, "global_batch_size", 6),
        ("optim.lr=1", None, "lr", 1.0),
        ("train.train_iter=1e3", None, "train_iter", 1000),
        ("train.scheduler.gamma=0.5", "scheduler", "gamma", 0.5),
        ("train.stop_after=9", None, "stop_after", 9),
        ("graph.debug=1", None, "graph_debug", 1),
    ],
)
def test_overrides_have_the_names_of_the_file(
    option: str, section: str | None, key: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    train = read(STYLE, option).plain()["train"]
    assert (train[section] if section else train)[key] == value


def test_an_item_of_a_list_is_overridden_in_either_spelling() -> None:
    for key in ("dataloader.train.dataset[0].data_dir", "dataloader.train.dataset.0.data_dir"):
        config = read(STYLE, f"{key}=sample")
        assert config.data.path == "sample"
        assert '"data_dir": "sample"' in config.yaml()


@pytest.mark.skipif(importlib.util.find_spec("omegaconf") is None, reason="omegaconf is not installed")
def test_without_omegaconf_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["model.n_layer=2", "dataloader.train.dataset[0].ctx_len=32"]
    with_library = read(STYLE, *options)
    monkeypatch.setattr("projects.rwkv_v4.config._optional", lambda name: None)
    without = read(STYLE, *options)
    assert without.plain() == with_library.plain()
    assert without.yaml() == with_library.yaml()


def test_the_saved_config_reads_back_under_the_names_of_the_file() -> None:
    yaml = pytest.importorskip("yaml")
    saved = yaml.safe_load(read(STYLE).yaml())
    assert saved["train"]["train_micro_batch_size"] == 4
    assert saved["optim"]["_target_"] == "oneflow.optim.Adam"
    assert saved["dataloader"]["train"]["dataset"][0]["epoch_length_fixed"] == 9996


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("train.amp.enabled=True", "train.amp.enabld=True", r"line 45: 'train.amp.enabld' is .*train.amp.enabled\?"),
        ("n_layer=6", "n_layers=6", r"line 29: 'model.n_layers' is not an option; did you mean model.n_layer"),
        ("step_size=1000", "step_sise=1000", r"'train.scheduler.step_sise' is not an option"),
        ("train.train_epoch=1", "trian = dict(a=1)", r"'trian' is not an option; did you mean train\?"),
        ("train.train_epoch=1", "tran.train_epoch=1", r"line 61: 'tran' is not read"),
        ("n_layer=6", "n_layer='6'", r"'model.n_layer': expected a value like 6, got '6'"),
        ("train.amp.enabled=True", "train.amp=True", r"'train.amp': expected a value like"),
        ("flow.optim.Adam", "flow.optim.LAMB", r"line 24: oneflow.optim.LAMB has no counterpart here"),
        ("flow.optim.lr_scheduler.StepLR", "GPT", r"'train.scheduler': expected LazyCall of .*StepLR"),
        ("common/train.py", "common/optim.py", r"get_config\('common/optim.py'\): known are common/train.py"),
        ("lr=8e-4", "lr=8e-4, **{}", r"of the form \*\*x are not read"),
        ("train.train_epoch=1", "for i in range(3): pass", r"line 61: 'for i in range\(3\):' is not read"),
        ("train.train_epoch=1", "train.train_epoch=(", r"config.py, line 6\d"),
        ("train.train_epoch=1", "train.dist.pipeline_parallel_size=2", r"pipeline_parallel_size=2: .* knows 1 only"),
        ("train.train_epoch=1", "train.dist.tensor_parallel_size=2", r"tensor_parallel_size=2 on 1 ranks"),
        ("test.enable=False", "test.enable=True", r"test.enable=True: this trainer knows False only"),
        ("            ctx_len=1024", "            ctx_len=2048", r"ctx_len=2048 does not fit into model.ctx_len=1024"),
    ],
)
def test_mistakes_are_named(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(changed(old, new))


@pytest.mark.parametrize("option", ["optim._target_=os.system", "train.lr=1", "train.train_micro_batch_size=many"])
def test_wrong_overrides_are_named(option: str) -> None:
    with pytest.raises(ConfigError, match=option.partition("=")[0].split("._")[0]):
        read(STYLE, option)


@pytest.mark.parametrize(
    "line",
    [
        "open('ran', 'w')",
        "x = open('ran', 'w')",
        "train.seed = __import__('pathlib').Path('ran').touch()",
        "model = LazyCall(open)(file='ran', mode='w')",
        "model = dict(_target_='os.system', command='touch ran')",
        "x = [open('ran', 'w') for i in (1,)]",
        "x = f\"{open('ran', 'w')}\"",
        "from ran import *\nx = ran()",
    ],
)
def test_nothing_in_the_file_runs(line: str) -> None:
    Path("ran.py").write_text("open('ran', 'w')")
    with pytest.raises(ConfigError, match=r"config.py, line"):
        read(f"{STYLE}\n{line}\n")
    assert not Path("ran").exists()


def test_arithmetic_of_numbers_is_read() -> None:
    assert read(changed("n_layer=6", "n_layer=-2 * -3 + 4 // 2")).model.n_layer == 8
    with pytest.raises(ConfigError, match="'1 / 0' is no number"):
        read(changed("n_layer=6", "n_layer=1 / 0"))


def test_our_own_configs_are_not_taken_for_one() -> None:
    assert recognises(STYLE)
    configs = list((Path(__file__).parents[3] / "projects" / "rwkv_v4" / "configs").glob("*.py"))
    assert configs
    assert not any(recognises(path.read_text()) for path in configs)


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({"name": "StepLR", "step_size": 1000, "gamma": 1.0}, [1, 1, 1, 1]),
        ({"name": "WarmupStepLR", "step_size": 50, "gamma": 0.5}, [0.001, 0.5005, 1, 0.25]),
        ({"name": "ExponentialLR", "gamma": 0.5}, [1, 2**-5, 2**-10, 2**-100]),
        ({"name": "WarmupCosineLR", "alpha": 0.01, "warmup_method": "constant"}, [0.001, 0.001, 0.97577, 0.01]),
    ],
)
def test_schedules(options: dict, factors: list[float]) -> None:
    schedule = named(options, train_iter=100, warmup_iter=10)
    assert [schedule(i) for i in (0, 5, 10, 100)] == pytest.approx(factors, rel=1e-4)


def test_schedules_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="expected one of StepLR, WarmupStepLR"):
        named({"name": "Sawtooth"}, 10, 0)
    with pytest.raises(ConfigError, match=r"StepLR cannot be used with \{'step_size': 0\}"):
        named({"name": "StepLR", "step_size": 0}, 10, 0)
