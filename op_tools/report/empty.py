"""What a view says where a run has nothing for it: the command that would leave it, by the view's address."""

from __future__ import annotations

from typing import Final

from .words import both

EMPTY: Final = {
    "diff": both(
        "One run alone has no difference. Record both and align them: op_tools diff A B --html diff.html",
        "单个运行没有差异可看。分别记录两次运行后对齐：op_tools diff A B --html diff.html",
    ),
    "graph": both(
        "No modules are known of this run. To record its graph: op_tools trace --steps 0:1 train.py",
        "本次运行没有模块信息。要记录计算图：op_tools trace --steps 0:1 train.py",
    ),
    "loss": both(
        "No losses beside this run. Give a metrics.json or a log: op_tools report RUN --loss metrics.json [REFERENCE]",
        "没有损失数据。请给出 metrics.json 或训练日志：op_tools report RUN --loss metrics.json [参考运行]",
    ),
    "memory": both(
        "No trace in this run. To see memory by kind and module: op_tools trace --steps 0:2 train.py",
        "本次运行没有 trace。要查看各类、各模块的内存：op_tools trace --steps 0:2 train.py",
    ),
    "overflow": both(
        "No statistics in this run. To see where magnitudes grow: op_tools run OpOverflowCheck train.py",
        "本次运行没有统计量。要查看数值在哪里变大：op_tools run OpOverflowCheck train.py",
    ),
    "records": both(
        "No records in this run. Tools leave them: op_tools run OpAutoCompare,OpTimeMeasure train.py",
        "本次运行没有记录。工具会留下记录：op_tools run OpAutoCompare,OpTimeMeasure train.py",
    ),
    "time": both(
        "No times in this run. To measure every operator: op_tools run OpTimeMeasure train.py",
        "本次运行没有计时。要测量每个算子：op_tools run OpTimeMeasure train.py",
    ),
}
