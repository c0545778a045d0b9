"""A new tool is one short file: the command, its help and the features find it by themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import op_tools
from op_tools import cli, launch, tools
from op_tools.tools.base import TOOLS, Tool
from op_tools.tools.features import features

SOURCE = '''
"""OpCountNumbers: how many numbers operators return."""

from op_tools.tools.base import Tool
from op_tools.watch.intercept import Call


class OpCountNumbers(Tool):
    """Count the numbers in all results."""

    name = "OpCountNumbers"
    prefix = "OP_COUNT_NUMBERS"
    feature = "count_numbers"
    columns = {"call_id": "INTEGER", "site": "INTEGER", "numbers": "INTEGER"}
    run_options = {"at_least": {"type": int, "metavar": "N", "help": "leave smaller results out"}}

    def __init__(self, *args, at_least=0, **kwargs):
        super().__init__(*args, **kwargs)
        self.at_least = at_least

    def after(self, call: Call) -> None:
        numbers = sum(t.numel() for t in call.results)
        if numbers >= self.at_least:
            self.count(call)
            self.record(call.id, self.site(call), numbers)

    def summary(self) -> list[str]:
        return [f"{sum(row['numbers'] for row in self.records())} numbers"]
'''


@pytest.fixture
def new_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "count_numbers.py").write_text(SOURCE)
    monkeypatch.setattr(tools, "__path__", [*tools.__path__, str(tmp_path)])
    yield
    TOOLS.pop("OpCountNumbers", None)
    sys.modules.pop("op_tools.tools.count_numbers", None)


def test_a_file_in_the_folder_of_the_tools_is_a_tool(
    new_tool: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(SOURCE.splitlines()) <= 60
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "OpCountNumbers, OpDtypeCast" in shown
    assert "OpCountNumbers: leave smaller results out" in shown
    assert features()["count_numbers"] is op_tools.OpCountNumbers  # type: ignore[attr-defined]

    monkeypatch.setenv("OP_TOOLS_INCLUDE_CPU", "1")
    monkeypatch.setenv("OP_TOOLS_CONSOLE", "summary")
    monkeypatch.setenv("OP_TOOLS_RESULTS_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["op_tools"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "job.py"
    script.write_text("import torch\ntorch.ones(2, 3)\ntorch.ones(1)\n")
    assert cli.main(["run", "OpCountNumbers,OpObserve", "--no-ditorch", "--at_least", "2", str(script)]) == 0
    assert "6 numbers" in capsys.readouterr().out
    assert launch.main(["OpObserve", "--no-ditorch", "--at_least", "2", str(script)]) == 2
    assert "--at_least belongs to OpCountNumbers, not to OpObserve" in capsys.readouterr().err


def test_two_tools_of_one_name_are_an_error() -> None:
    with pytest.raises(TypeError, match=r"there is a tool 'OpObserve' in op_tools\.tools\.observe already"):
        type("OpOther", (Tool,), {"name": "OpObserve"})
    assert TOOLS["OpObserve"] is op_tools.OpObserve


def test_every_tool_of_the_package_is_exported() -> None:
    own = [tool.name for tool in tools.all_tools().values() if tool.__module__.startswith("op_tools.")]
    assert sorted(own) == sorted(
        name
        for name in op_tools.__all__
        if isinstance(getattr(op_tools, name), type(Tool)) and issubclass(getattr(op_tools, name), Tool)
    )
    with pytest.raises(AttributeError, match="OpNothing"):
        op_tools.OpNothing  # type: ignore[attr-defined]  # noqa: B018
