"""Tiny data for the public scripts of `wild.toml`: one function for each kind, named there under `prepare`.

Everything is drawn anew and small, in the files that the scripts look for. Nothing is copied from the real data sets,
and nothing is downloaded.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import os
import pickle
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEXT = "the quick brown fox jumps over the lazy dog and then sleeps in the warm sun; " * 40


def mnist(folder: Path, root: str, count: str = "256", *classes: str) -> None:
    """Random digits in the files of MNIST and FashionMNIST, or of a script's own class."""
    import numpy

    draw = numpy.random.default_rng(0)
    for name in classes or ("MNIST", "FashionMNIST"):
        raw = folder / root / name / "raw"
        raw.mkdir(parents=True, exist_ok=True)
        for part in ("train", "t10k"):
            size = int(count)
            images = draw.integers(0, 255, (size, 28, 28), dtype="uint8")
            labels = numpy.arange(size, dtype="uint8") % 10
            head = struct.pack(">IIII", 0x803, size, 28, 28)
            (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
            (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x801, size) + labels.tobytes())


def images(folder: Path, root: str, side: str = "64", each: str = "8", kinds: str = "2") -> None:
    """A folder of pictures in classes, for training and validation."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    for part in ("train", "val"):
        for kind in range(int(kinds)):
            where = folder / root / part / f"kind{kind}"
            where.mkdir(parents=True, exist_ok=True)
            for number in range(int(each)):
                pixels = draw.integers(0, 255, (int(side), int(side), 3), dtype="uint8")
                Image.fromarray(pixels).save(where / f"{number}.png")


def pairs(folder: Path, root: str, side: str = "64") -> None:
    """Pictures and masks, for segmentation."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    for kind in ("imgs", "masks"):
        (folder / root / kind).mkdir(parents=True, exist_ok=True)
        for number in range(12):
            shape = (int(side), int(side), 3) if kind == "imgs" else (int(side), int(side))
            pixels = draw.integers(0, 255, shape, dtype="uint8")
            name = f"{number}.png" if kind == "imgs" else f"{number}_mask.gif"
            Image.fromarray(pixels if kind == "imgs" else (pixels > 127).astype("uint8")).save(
                folder / root / kind / name
            )


def enwik8(folder: Path, file: str) -> None:
    """Text where enwik8 is expected; scripts read 95 MB of it, so it is long and compresses well."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wb", compresslevel=1) as out:
        piece = TEXT.encode() * 100
        for _ in range(int(96e6) // len(piece)):
            out.write(piece)


def text(folder: Path, file: str, times: str = "20") -> None:
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TEXT.replace(";", ";\n") * int(times))


def characters(folder: Path, root: str) -> None:
    """nanoGPT's data: characters as numbers."""
    import numpy

    letters = sorted(set(TEXT))
    numbers = numpy.array([letters.index(c) for c in TEXT * 4], dtype="uint16")
    (folder / root).mkdir(parents=True, exist_ok=True)
    for part in ("train", "val"):
        numbers.tofile(folder / root / f"{part}.bin")
    meta = {"vocab_size": len(letters), "itos": dict(enumerate(letters)), "stoi": {c: i for i, c in enumerate(letters)}}
    (folder / root / "meta.pkl").write_bytes(pickle.dumps(meta))


def cora(folder: Path, root: str) -> None:
    """A citation network in the files of Cora: 2,708 papers of 1,433 words."""
    import random

    draw = random.Random(0)
    kinds = "Case_Based Genetic_Algorithms Neural_Networks Probabilistic_Methods Reinforcement_Learning Theory"
    lines = []
    for paper in range(2708):
        words = ["0"] * 1433
        for _ in range(18):
            words[draw.randrange(1433)] = "1"
        lines.append("\t".join([str(paper), *words, draw.choice(kinds.split())]))
    (folder / root).mkdir(parents=True, exist_ok=True)
    (folder / root / "cora.content").write_text("\n".join(lines) + "\n")
    links = (f"{draw.randrange(2708)}\t{draw.randrange(2708)}" for _ in range(5429))
    (folder / root / "cora.cites").write_text("\n".join(links) + "\n")


def language_model(folder: Path, root: str, kind: str = "llama", width: str = "32") -> None:
    """A model of two small layers (llama or bert) with a tokenizer of words, as from_pretrained reads them."""
    import tokenizers
    import torch
    import transformers

    marks = {f"{name}_token": f"<{name}>" for name in ("unk", "pad", "bos", "eos", "mask", "cls", "sep")}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=list(marks.values()))
    words.train_from_iterator([TEXT], trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **marks).save_pretrained(folder / root)
    size: dict[str, Any] = {"hidden_size": int(width), "intermediate_size": 64, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 2, "max_position_embeddings": 512, "vocab_size": words.get_vocab_size()}
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**size, bos_token_id=2, eos_token_id=3, pad_token_id=1)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / root)
    else:
        transformers.BertForMaskedLM(transformers.BertConfig(**size)).save_pretrained(folder / root)


def samples(folder: Path, root: str, *columns: str) -> None:
    """Lines of JSON with the named columns, for training and testing; ``label`` is a truth value, ``score`` a share."""
    (folder / root).mkdir(parents=True, exist_ok=True)
    words = TEXT.split()
    for part in ("train", "validation", "test"):
        rows = []
        for number in range(16):
            texts = {c: " ".join(words[number + i : number + i + 12]) for i, c in enumerate(columns)}
            told: dict[str, Any] = {"label": number % 2 == 0, "score": number / 16}
            rows.append(json.dumps(texts | {name: value for name, value in told.items() if name in columns}))
        (folder / root / f"{part}.jsonl").write_text("\n".join(rows) + "\n")


def word_counts(folder: Path, file: str, count: str) -> None:
    """How many documents have a word, after how many there are: the words of `TEXT`, and made ones."""
    words = [*dict.fromkeys(TEXT.replace(";", "").split()), *(f"word{number}" for number in range(int(count)))]
    lines = [str(10 * len(words)), *(f"{word}\t{place + 1}" for place, word in enumerate(words))]
    (folder / file).write_text("\n".join(lines) + "\n")


def cifar(folder: Path, root: str, count: str = "64") -> None:
    """Random pictures in the files of CIFAR-10 and CIFAR-100."""
    import numpy

    draw = numpy.random.default_rng(0)

    def part(size: int, kinds: int, label: str) -> bytes:
        pixels = draw.integers(0, 255, (size, 3072), dtype="uint8")
        rows: dict[str, Any] = {"data": pixels, label: [number % kinds for number in range(size)]}
        return pickle.dumps(rows | ({"coarse_labels": [0] * size} if kinds == 100 else {}))

    ten, hundred = folder / root / "cifar-10-batches-py", folder / root / "cifar-100-python"
    for where in (ten, hundred):
        where.mkdir(parents=True, exist_ok=True)
    for name in [f"data_batch_{number}" for number in range(1, 6)] + ["test_batch"]:
        (ten / name).write_bytes(part(int(count), 10, "labels"))
    (ten / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"kind{k}" for k in range(10)]}))
    for name in ("train", "test"):
        (hundred / name).write_bytes(part(int(count), 100, "fine_labels"))
    (hundred / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"kind{k}" for k in range(100)]}))


def planetoid(folder: Path, root: str, name: str = "cora") -> None:
    """A citation network of 300 papers in the raw files of Planetoid."""
    import numpy
    import scipy.sparse

    draw = numpy.random.default_rng(0)
    raw = folder / root / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    sizes = {"x": 60, "tx": 100, "allx": 600}
    for kind, size in sizes.items():
        words = scipy.sparse.random(size, 64, 0.1, "csr", "float32", random_state=0)
        words.data[:] = 1
        (raw / f"ind.{name}.{kind}").write_bytes(pickle.dumps(words))
        labels = numpy.eye(7, dtype="int32")[numpy.arange(size) % 7]
        (raw / f"ind.{name}.{kind.replace('x', 'y')}").write_bytes(pickle.dumps(labels))
    graph = {paper: [int(other) for other in draw.integers(0, 700, 4)] for paper in range(700)}
    (raw / f"ind.{name}.graph").write_bytes(pickle.dumps(graph))
    (raw / f"ind.{name}.test.index").write_text("\n".join(str(paper) for paper in range(600, 700)) + "\n")


def springs(folder: Path, root: str, suffix: str = "_springs5") -> None:
    """Trajectories of five particles, as NRI's simulator writes them."""
    import numpy

    draw = numpy.random.default_rng(0)
    (folder / root).mkdir(parents=True, exist_ok=True)
    for part in ("train", "valid", "test"):
        steps = 100 if part == "test" else 49
        for kind in ("loc", "vel"):
            numpy.save(folder / root / f"{kind}_{part}{suffix}.npy", draw.normal(size=(16, steps, 2, 5)))
        numpy.save(folder / root / f"edges_{part}{suffix}.npy", draw.integers(0, 2, (16, 5, 5)).astype("float64"))


def spectrograms(folder: Path, root: str) -> None:
    """Voices for AutoVC: for each speaker an embedding and utterances of 80 bands."""
    import numpy

    draw = numpy.random.default_rng(0)
    speakers = []
    for speaker in range(4):
        files = []
        for number in range(3):
            file = Path(f"p{speaker}") / f"{number}.npy"
            (folder / root / file).parent.mkdir(parents=True, exist_ok=True)
            numpy.save(folder / root / file, draw.random((150, 80), dtype="float32"))
            files.append(str(file))
        speakers.append([f"p{speaker}", draw.random(256, dtype="float32"), *files])
    (folder / root / "train.pkl").write_bytes(pickle.dumps(speakers))


def chorales(folder: Path, file: str) -> None:
    """Pieces of 88 notes by time, as pyro keeps those that it has read."""
    import torch

    draw = torch.Generator().manual_seed(0)
    parts = {}
    for part in ("train", "valid", "test"):
        lengths = torch.randint(8, 16, (12,), generator=draw)
        pieces = [(torch.rand(int(length), 88, generator=draw) < 0.05).float() for length in lengths]
        parts[part] = {"sequence_lengths": lengths, "sequences": pieces}
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(pickle.dumps(parts))


def voices(folder: Path, root: str, *lists: str) -> None:
    """Short noises as wave files, with lists of them as LJSpeech has (name|text|text)."""
    import numpy
    from scipy.io import wavfile

    draw = numpy.random.default_rng(0)
    (folder / root).mkdir(parents=True, exist_ok=True)
    for number in range(4):
        wavfile.write(folder / root / f"{number}.wav", 22050, draw.integers(-9000, 9000, 16384).astype("int16"))
    for file in lists:
        (folder / file).write_text("".join(f"{number}|a noise|a noise\n" for number in range(4)))


def views(folder: Path, root: str, side: str = "16") -> None:
    """A scene seen from four places, in the files of Blender's exporter that NeRF reads."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    for part in ("train", "val", "test"):
        frames = []
        (folder / root / part).mkdir(parents=True, exist_ok=True)
        for number in range(4):
            pixels = draw.integers(0, 255, (int(side), int(side), 4), dtype="uint8")
            Image.fromarray(pixels).save(folder / root / part / f"r_{number}.png")
            place = numpy.eye(4)
            place[2, 3] = 4.0
            frames.append({"file_path": f"./{part}/r_{number}", "transform_matrix": place.tolist()})
        told = {"camera_angle_x": 0.7, "frames": frames}
        (folder / root / f"transforms_{part}.json").write_text(json.dumps(told))


def patches(folder: Path, file: str, named: str = "") -> None:
    """Pairs of coarse and fine grey pictures in an HDF5 file; with ``named``, one data set for each."""
    import h5py
    import numpy

    draw = numpy.random.default_rng(0)
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / file, "w") as out:
        for kind in ("lr", "hr"):
            pixels = draw.integers(0, 255, (32, 33, 33)).astype("float32")
            if named:
                for number in range(2):
                    out.create_dataset(f"{kind}/{number}", data=pixels[number])
            else:
                out.create_dataset(kind, data=pixels)


def coco(folder: Path, root: str) -> None:
    """Pictures with boxes and masks in the files of COCO 2017."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    for part in ("train2017", "val2017"):
        (folder / root / part).mkdir(parents=True, exist_ok=True)
        pictures, boxes = [], []
        for number in range(1, 5):
            Image.fromarray(draw.integers(0, 255, (64, 64, 3), dtype="uint8")).save(
                folder / root / part / f"{number}.jpg"
            )
            pictures.append({"id": number, "file_name": f"{number}.jpg", "width": 64, "height": 64})
            corners = [8, 8, 48, 8, 48, 48, 8, 48]
            about: dict[str, Any] = {"id": number, "image_id": number, "category_id": 1, "bbox": [8, 8, 40, 40]}
            boxes.append(about | {"area": 1600, "iscrowd": 0, "segmentation": [corners]})
        told = {"images": pictures, "annotations": boxes, "categories": [{"id": 1, "name": "thing"}]}
        (folder / root / "annotations").mkdir(exist_ok=True)
        (folder / root / "annotations" / f"instances_{part}.json").write_text(json.dumps(told))


def boxes(folder: Path, root: str) -> None:
    """Pictures with boxes in the files of YOLO, and the file that describes them."""
    import numpy
    from PIL import Image

    draw = numpy.random.default_rng(0)
    for kind in ("images", "labels"):
        (folder / root / kind).mkdir(parents=True, exist_ok=True)
    for number in range(8):
        pixels = draw.integers(0, 255, (64, 64, 3), dtype="uint8")
        Image.fromarray(pixels).save(folder / root / "images" / f"{number}.jpg")
        (folder / root / "labels" / f"{number}.txt").write_text(f"{number % 2} 0.5 0.5 0.4 0.4\n")
    told = {"path": str(folder / root), "train": "images", "val": "images", "names": ["a", "b"]}
    (folder / root / "data.yaml").write_text(json.dumps(told))


def autoencoder(folder: Path, root: str) -> None:
    """An autoencoder of pictures as diffusers loads it: four channels at an eighth of the side."""
    import diffusers
    import torch

    torch.manual_seed(0)
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    model = diffusers.AutoencoderKL(**kinds, block_out_channels=[8] * 4, norm_num_groups=4, latent_channels=4)
    model.save_pretrained(folder / root)


def gpt2_words(folder: Path, root: str) -> None:
    """GPT-2's vocabulary where tiktoken keeps downloads, from a checkout that has it beside this one."""
    source = Path(WORDS[0]) / "gpt-2-Pytorch" / "GPT2"
    (folder / root).mkdir(parents=True, exist_ok=True)
    for name in ("vocab.bpe", "encoder.json"):
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        shutil.copy(source / name, folder / root / hashlib.sha1(address.encode()).hexdigest())


def tokens(folder: Path, file: str, kind: str = "llm.c", highest: str = "1000") -> None:
    """Random tokens as llm.c (with a head), llama2.c (bare) or build-nanogpt (numpy) store them."""
    import numpy

    drawn = numpy.random.default_rng(0).integers(0, int(highest), 1 << 19).astype("uint16")
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    if kind == "numpy":
        numpy.save(folder / file, drawn)
        return
    head = numpy.zeros(256, dtype="int32")
    head[:3] = 20240520, 1, len(drawn)
    (folder / file).write_bytes((head.tobytes() if kind == "llm.c" else b"") + drawn.tobytes())


def documents(folder: Path, root: str) -> None:
    """Texts in parquet files, as nanochat reads them."""
    import pyarrow
    import pyarrow.parquet

    (folder / root).mkdir(parents=True, exist_ok=True)
    words = TEXT.split()
    texts = [" ".join(words[number % 400 : number % 400 + 200]) for number in range(2048)]
    for number in range(2):
        table = pyarrow.table({"text": texts})
        pyarrow.parquet.write_table(table, folder / root / f"shard_{number:05d}.parquet", row_group_size=256)


def text_of(folder: Path, file: str, content: str) -> None:
    """A small file as it stands in the list."""
    (folder / file).write_text(content)


def folder(inside: Path, name: str) -> None:
    """An empty folder that the script writes into."""
    (inside / name).mkdir(parents=True, exist_ok=True)


def python(folder: Path, *arguments: str) -> None:
    """Run one of the project's own scripts, on the CPU and without ditorch; NAME=value before it are variables."""
    settings = dict(
        word.split("=", 1) for word in itertools.takewhile(lambda word: not word.startswith("-"), arguments)
    )
    line = [sys.executable, *arguments[len(settings) :]]
    done = subprocess.run(line, cwd=folder, capture_output=True, text=True, env={**os.environ, **settings})
    if done.returncode:
        raise RuntimeError(f"{line} did not work:\n{done.stderr[-2000:]}")


WORDS = ["."]
"""Where `gpt2_words` looks for the checkout that has them; the run sets it."""


RECIPES: dict[str, Callable[..., None]] = {
    "language_model": language_model,
    "samples": samples,
    "word_counts": word_counts,
    "mnist": mnist,
    "images": images,
    "pairs": pairs,
    "enwik8": enwik8,
    "text": text,
    "characters": characters,
    "cora": cora,
    "cifar": cifar,
    "planetoid": planetoid,
    "springs": springs,
    "spectrograms": spectrograms,
    "chorales": chorales,
    "voices": voices,
    "views": views,
    "patches": patches,
    "coco": coco,
    "boxes": boxes,
    "autoencoder": autoencoder,
    "gpt2_words": gpt2_words,
    "tokens": tokens,
    "documents": documents,
    "python": python,
    "text_of": text_of,
    "folder": folder,
}
