"""Draws the picture of the whole system, in English and Chinese, for light and dark pages.

    python docs/picture.py            # write docs/ditorch*.svg
    python docs/picture.py --check    # say which of them are not what this script draws, and exit with 1

Texts are data (`ENGLISH`, `CHINESE`); a text that does not fit into its box is an error, whatever font a reader has.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 1000, 690
SANS = "-apple-system,'Segoe UI','Noto Sans',Helvetica,Arial,'PingFang SC','Microsoft YaHei',sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"


@dataclass(frozen=True)
class Theme:
    """Colours of a page; each part of the system has a frame and a ground."""

    page: str
    text: str
    faint: str
    chip: str
    script: tuple[str, str]
    ditorch: tuple[str, str]
    op_tools: tuple[str, str]
    results: tuple[str, str]
    kernels: tuple[str, str]


LIGHT = Theme(
    *("#ffffff", "#1f2328", "#59636e", "#ffffff", ("#8c959f", "#f6f8fa"), ("#0969da", "#eaf5ff")),
    *(("#8250df", "#f8f1ff"), ("#9a6700", "#fff9e0"), ("#1a7f37", "#e9fbee")),
)
DARK = Theme(
    *("#0d1117", "#e6edf3", "#9198a1", "#0d1117", ("#7d8590", "#161b22"), ("#58a6ff", "#10213a")),
    *(("#bc8cff", "#211a38"), ("#d29922", "#2a2212"), ("#3fb950", "#11271a")),
)


@dataclass(frozen=True)
class Words:
    """All texts of the picture in one language."""

    title: str
    script: str
    layer: str
    layer_does: tuple[str, ...]
    microscope: str
    tools: tuple[tuple[str, str], ...]
    results: str
    results_are: tuple[str, ...]
    captures: str
    captures_are: str
    replay: str
    replay_does: tuple[str, ...]
    accelerators: str
    vendors: tuple[str, ...]
    cpu: str
    cpu_does: tuple[str, ...]
    asks: str
    calls: str
    device: str
    itself: str
    golden: str
    again: str


ENGLISH = Words(
    title="ditorch decides where PyTorch code runs; op_tools watches what it does there",
    script="Your training script, written for CUDA",
    layer="device layer",
    layer_does=(
        "chooses one backend",
        "“cuda” means its device",
        "fills gaps in collectives",
        "can undo every patch",
    ),
    microscope="microscope: sees every call, forward and backward",
    tools=(
        ("OpCapture", "saves inputs and outputs"),
        ("OpAutoCompare", "compares with float64"),
        ("OpFallback", "runs calls on the CPU"),
        ("OpDtypeCast", "changes their dtype"),
        ("OpTimeMeasure", "times each operator"),
        ("OpOverflowCheck", "finds first NaN or Inf"),
        ("OpObserve", "prints arguments"),
        ("OpTrace", "keeps the graph of a run"),
        ("apply_feature", "a tool on any function"),
    ),
    results="Results",
    results_are=("verdicts and times,", "with module and line", "console · SQLite · CSV"),
    captures="Captured calls",
    captures_are=".pth files",
    replay="Offline replay",
    replay_does=("runs the calls again:", "accuracy and time"),
    accelerators="Accelerators, through each vendor's PyTorch",
    vendors=(
        *("Ascend", "Cambricon", "Moore Threads", "Biren", "Enflame"),
        *("Intel", "Habana", "Apple", "NVIDIA, AMD", "soft (software)"),
    ),
    cpu="CPU",
    cpu_does=("golden runs in float64", "calls that fall back"),
    asks='device="cuda"',
    calls="calls, while a tool is on",
    device="this machine's device",
    itself="the call itself",
    golden="golden run, fallback",
    again="on any device",
)
CHINESE = Words(
    title="ditorch 决定 PyTorch 代码在哪里运行；op_tools 观察它在那里做了什么",
    script="为 CUDA 编写的训练脚本",
    layer="设备层",
    layer_does=("选择一个后端", "让 “cuda” 指向该设备", "补齐缺少的集合通信", "所有修改都可撤销"),
    microscope="显微镜：观察每次调用的前向和反向",
    tools=(
        ("OpCapture", "保存输入和输出"),
        ("OpAutoCompare", "与 float64 结果对比"),
        ("OpFallback", "在 CPU 上运行算子"),
        ("OpDtypeCast", "转换数据类型"),
        ("OpTimeMeasure", "测量算子耗时"),
        ("OpOverflowCheck", "找出最先的 NaN 或 Inf"),
        ("OpObserve", "打印算子参数"),
        ("OpTrace", "记录运行的计算图"),
        ("apply_feature", "用于任意函数"),
    ),
    results="结果",
    results_are=("判定和耗时，", "附模块和代码行", "控制台 · SQLite · CSV"),
    captures="抓取的调用",
    captures_are=".pth 文件",
    replay="离线重放",
    replay_does=("再次运行抓取的调用：", "精度和耗时"),
    accelerators="加速器，通过各厂商的 PyTorch",
    vendors=("昇腾", "寒武纪", "摩尔线程", "壁仞", "燧原", "Intel", "Habana", "Apple", "NVIDIA、AMD", "soft（软件）"),
    cpu="CPU",
    cpu_does=("float64 基准计算", "回退的算子"),
    asks='device="cuda"',
    calls="工具开启时的调用",
    device="本机设备",
    itself="调用本身",
    golden="基准计算、回退",
    again="在任意设备上",
)


class Drawing:
    """Shapes and texts, one line of SVG each."""

    def __init__(self, theme: Theme, title: str) -> None:
        self.theme = theme
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            f'role="img" font-family="{SANS}">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{theme.page}"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, colours: tuple[str, str], radius: int = 10) -> None:
        """A rounded frame with its ground."""
        stroke, fill = colours
        place = f'x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}"'
        self.lines.append(f'<rect {place} fill="{fill}" stroke="{stroke}" stroke-width="1.5"/>')

    def text(
        self,
        x: int,
        y: int,
        text: str,
        room: int,
        size: int = 14,
        colour: str = "",
        bold: bool = False,
        mono: bool = False,
        anchor: str = "start",
    ) -> None:
        """One line of text; ValueError where it may be wider than its room."""
        needed = text_width(text, size, bold, mono)
        if needed > room:
            raise ValueError(f"{text!r} needs {needed:.0f} of {room} pixels")
        style = ' font-weight="600"' * bold + f' font-family="{MONO}"' * mono
        if anchor != "start":
            style += f' text-anchor="{anchor}"'
        at = f'x="{x}" y="{y}" font-size="{size}" fill="{colour or self.theme.text}"'
        self.lines.append(f"<text {at}{style}>{escape(text)}</text>")

    def chip(self, x: int, y: int, width: int, height: int, colours: tuple[str, str]) -> None:
        """A small box inside a box."""
        self.box(x, y, width, height, (colours[0], self.theme.chip), 6)

    def arrow(self, colour: str, *points: tuple[int, int]) -> None:
        """A line with a head at its last point; its last part is upright or level."""
        (before_x, before_y), (x, y) = points[-2:]
        back_x, back_y = (x > before_x) - (x < before_x), (y > before_y) - (y < before_y)
        line = [*points[:-1], (x - 8 * back_x, y - 8 * back_y)]
        path = "M" + " L".join(f"{a} {b}" for a, b in line)
        self.lines.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        wings = [(x - 9 * back_x + side * 5 * back_y, y - 9 * back_y + side * 5 * back_x) for side in (1, -1)]
        head = "M" + " L".join(f"{a} {b}" for a, b in [(x, y), *wings])
        self.lines.append(f'<path d="{head} Z" fill="{colour}"/>')

    def svg(self) -> str:
        """The file."""
        return "\n".join([*self.lines, "</svg>", ""])


def text_width(text: str, size: int, bold: bool = False, mono: bool = False) -> float:
    """At most this many pixels in the wide fonts that readers have (`text_width("ditorch", 14)`)."""
    latin = 0.61 if mono else 0.64 if bold else 0.57
    return size * sum(1.0 if unicodedata.east_asian_width(letter) in "WFA" else latin for letter in text)


def draw(theme: Theme, words: Words) -> str:
    """The picture as SVG (`draw(DARK, ENGLISH)`)."""
    drawing = Drawing(theme, words.title)
    _script(drawing, words)
    _layer(drawing, words)
    _tools(drawing, words)
    _results(drawing, words)
    _kernels(drawing, words)
    _arrows(drawing, words)
    return drawing.svg()


def _script(drawing: Drawing, words: Words) -> None:
    drawing.box(20, 20, 960, 96, drawing.theme.script)
    drawing.text(40, 48, words.script, 920, 17, bold=True)
    code = (("import torch", "import ditorch"), ('model = Model().to("cuda")', "loss = model(x).sum()"))
    for x, column in zip((40, 280), code):
        for y, line in zip((74, 98), column):
            drawing.text(x, y, line, 280, 14, mono=True)
    drawing.text(620, 74, "with op_tools.OpAutoCompare():", 340, 14, mono=True)
    drawing.text(654, 98, "loss = step()", 306, 14, mono=True)


def _layer(drawing: Drawing, words: Words) -> None:
    theme = drawing.theme
    drawing.box(20, 176, 240, 296, theme.ditorch)
    drawing.text(40, 208, "ditorch", 100, 20, theme.ditorch[0], bold=True)
    drawing.text(40, 230, words.layer, 200, 14, theme.faint)
    for number, line in enumerate(words.layer_does):
        drawing.chip(34, 246 + 40 * number, 212, 32, theme.ditorch)
        drawing.text(46, 267 + 40 * number, line, 192, 13)
    for y, line in ((430, "ditorch run · doctor"), (452, "scan · conformance")):
        drawing.text(40, y, line, 206, 13, theme.faint, mono=True)


def _tools(drawing: Drawing, words: Words) -> None:
    theme = drawing.theme
    drawing.box(290, 176, 424, 296, theme.op_tools)
    drawing.text(310, 208, "op_tools", 120, 20, theme.op_tools[0], bold=True)
    drawing.text(310, 230, words.microscope, 394, 14, theme.faint)
    for number, (name, does) in enumerate(words.tools):
        x, y = 304 + 202 * (number % 2), 246 + 55 * (number // 2)
        drawing.chip(x, y, 194, 47, theme.op_tools)
        drawing.text(x + 12, y + 19, name, 176, 14, bold=True)
        drawing.text(x + 12, y + 37, does, 176, 12, theme.faint)


def _results(drawing: Drawing, words: Words) -> None:
    theme = drawing.theme
    drawing.box(760, 176, 220, 104, theme.results)
    drawing.text(778, 202, words.results, 190, 16, theme.results[0], bold=True)
    for number, line in enumerate(words.results_are):
        drawing.text(778, 225 + 20 * number, line, 192, 13, theme.faint if number == 2 else "")
    drawing.box(760, 300, 220, 58, theme.results)
    drawing.text(778, 325, words.captures, 190, 16, theme.results[0], bold=True)
    drawing.text(778, 345, words.captures_are, 190, 13)
    drawing.box(760, 388, 220, 84, theme.op_tools)
    drawing.text(778, 414, words.replay, 190, 16, theme.op_tools[0], bold=True)
    for number, line in enumerate(words.replay_does):
        drawing.text(778, 436 + 20 * number, line, 192, 13)


def _kernels(drawing: Drawing, words: Words) -> None:
    theme = drawing.theme
    drawing.box(20, 540, 960, 130, theme.kernels)
    drawing.text(40, 567, words.accelerators, 660, 16, theme.kernels[0], bold=True)
    for number, vendor in enumerate(words.vendors):
        x, y = 34 + 134 * (number % 5), 580 + 42 * (number // 5)
        drawing.chip(x, y, 126, 34, theme.kernels)
        drawing.text(x + 63, y + 22, vendor, 122, 14, anchor="middle")
    drawing.text(780, 567, words.cpu, 190, 16, theme.kernels[0], bold=True)
    for number, line in enumerate(words.cpu_does):
        drawing.chip(774, 580 + 42 * number, 192, 34, theme.kernels)
        drawing.text(870, 602 + 42 * number, line, 188, 13, anchor="middle")


def _arrows(drawing: Drawing, words: Words) -> None:
    theme = drawing.theme
    blue, violet, amber = theme.ditorch[0], theme.op_tools[0], theme.results[0]
    drawing.arrow(blue, (140, 116), (140, 176))
    drawing.text(152, 151, words.asks, 130, 13, theme.faint, mono=True)
    drawing.arrow(violet, (502, 116), (502, 176))
    drawing.text(514, 151, words.calls, 200, 13, theme.faint)
    drawing.arrow(blue, (140, 472), (140, 540))
    drawing.text(152, 511, words.device, 180, 13, theme.faint)
    drawing.arrow(violet, (400, 472), (400, 540))
    drawing.text(412, 511, words.itself, 160, 13, theme.faint)
    drawing.arrow(violet, (640, 472), (640, 506), (806, 506), (806, 540))
    drawing.text(648, 498, words.golden, 160, 13, theme.faint)
    drawing.arrow(violet, (930, 472), (930, 540))
    drawing.text(922, 511, words.again, 110, 13, theme.faint, anchor="end")
    drawing.arrow(amber, (714, 228), (760, 228))
    drawing.arrow(amber, (714, 329), (760, 329))
    drawing.arrow(amber, (870, 358), (870, 388))


def pictures() -> Iterator[tuple[Path, str]]:
    """Each file and what is to be in it."""
    for language, words in (("", ENGLISH), (".zh-CN", CHINESE)):
        for mode, theme in (("", LIGHT), ("-dark", DARK)):
            yield FOLDER / f"ditorch{mode}{language}.svg", draw(theme, words)


def main(arguments: list[str]) -> int:
    """Write the files, or check them."""
    if arguments not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    status = 0
    for path, content in pictures():
        if not arguments:
            path.write_bytes(content.encode())
        elif not path.exists() or path.read_bytes() != content.encode():
            print(f"{path} is not what {Path(__file__).name} draws", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
