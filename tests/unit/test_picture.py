"""The picture of the system is what its script draws, and shows what there is."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from ditorch.backends import BUILTIN
from op_tools.tools import all_tools

ROOT = Path(__file__).parents[2]
SHOWN = {
    "ascend": ("Ascend", "昇腾"),
    "biren": ("Biren", "壁仞"),
    "biren_supa": ("Biren", "壁仞"),
    "cambricon": ("Cambricon", "寒武纪"),
    "cpu": ("CPU", "CPU"),
    "cuda": ("NVIDIA, AMD", "NVIDIA、AMD"),
    "enflame": ("Enflame", "燧原"),
    "habana": ("Habana", "Habana"),
    "intel": ("Intel", "Intel"),
    "mps": ("Apple", "Apple"),
    "musa": ("Moore Threads", "摩尔线程"),
    "soft": ("soft (software)", "soft（软件）"),
}
LEFT_OUT = {"dipu"}  # not a chip: DeepLink's layer over several of them


@pytest.fixture(scope="module")
def picture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("picture", ROOT / "docs" / "picture.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_committed_files_are_what_the_script_draws(picture: ModuleType) -> None:
    drawn = dict(picture.pictures())
    assert {path.name for path in drawn} == {
        *("ditorch.svg", "ditorch-dark.svg", "ditorch.zh-CN.svg", "ditorch-dark.zh-CN.svg")
    }
    for path, content in drawn.items():
        assert path.read_bytes() == content.encode(), f"python docs/picture.py draws another {path.name}"


def test_check_names_what_differs(
    picture: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(picture, "FOLDER", tmp_path)
    assert picture.main(["--check"]) == 1
    assert picture.main([]) == 0
    assert picture.main(["--check"]) == 0
    capsys.readouterr()
    (tmp_path / "ditorch-dark.svg").write_text("<svg/>")
    assert picture.main(["--check"]) == 1
    assert capsys.readouterr().err == f"{tmp_path / 'ditorch-dark.svg'} is not what picture.py draws\n"
    assert picture.main(["--chekc"]) == 2


@pytest.mark.parametrize(("file", "language"), [("ditorch.svg", 0), ("ditorch-dark.zh-CN.svg", 1)])
def test_every_tool_and_every_device_is_shown(file: str, language: int) -> None:
    texts = {element.text for element in ElementTree.parse(ROOT / "docs" / file).iter() if element.text}
    own = {name for name, tool in all_tools().items() if tool.__module__.startswith("op_tools.")}
    assert own | {"apply_feature"} <= texts
    assert {backend.name for backend in BUILTIN} == SHOWN.keys() | LEFT_OUT
    assert {names[language] for names in SHOWN.values()} <= texts


def test_a_text_that_does_not_fit_is_refused(picture: ModuleType) -> None:
    drawing = picture.Drawing(picture.LIGHT, "x")
    drawing.text(0, 0, "a & b", 100)
    assert ">a &amp; b<" in drawing.svg()
    with pytest.raises(ValueError, match="'寒武纪 MLU' needs 74 of 70 pixels"):
        drawing.text(0, 0, "寒武纪 MLU", 70)


@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_readmes_show_it_in_both_modes_and_link_to_files_that_are_there(readme: str, picture: ModuleType) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    ending = readme.removeprefix("README").removesuffix(".md")
    assert re.search(rf'\(prefers-color-scheme: dark\)" srcset="docs/ditorch-dark{re.escape(ending)}\.svg"', text)
    words = picture.CHINESE if ending else picture.ENGLISH
    assert f'src="docs/ditorch{ending}.svg" alt="{words.title}"' in text
    links = re.findall(r'(?:\]\(|src="|srcset=")((?!http)[^)#"]+)', text)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []
