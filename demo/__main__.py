"""The demonstration that ``make demo`` runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule
from rich.syntax import Syntax

from .chart import chart

HERE = Path(__file__).parent
ROOT = HERE.parent
SCRIPT = HERE / "train_gpt.py"
RESULTS = Path("demo_results")  # below ROOT, where everything runs
FAULTY = RESULTS / "faulty"
STEPS = 100
# A kernel that is wrong for large inputs only: of all layers, just `down` is large enough to meet it.
FAULT = "addmm: noise=2, min_numel=393216"
console = Console(highlight=False)


def main() -> int:
    console.print(
        Panel(
            "[bold]ditorch[/]: PyTorch code written for CUDA runs on the accelerator that a machine has.\n"
            "[bold]op_tools[/]: and when it gives wrong results there, they name the operator to blame.",
            border_style="cyan",
        )
    )
    right = act_runs()
    wrong, found = act_goes_wrong()
    repaired = act_repaired(found)
    page = act_page(right, wrong)
    console.print(Rule("the three runs", style="cyan"))
    curves = {
        "healthy device": ("green", right),
        "faulty kernel": ("red", wrong),
        "with OpFallback": ("cyan", repaired),
    }
    console.print(chart(curves))
    same = "the same losses as on the healthy device, to the last digit" if repaired == right else "close to healthy"
    console.print(
        f"\nloss after {STEPS} steps: [green]{right[-1]:.3f}[/] healthy, [red]{wrong[-1]:.3f}[/] with the faulty "
        f"kernel, [cyan]{repaired[-1]:.3f}[/]\nwith one operator moved to the CPU: {same}.\n"
    )
    console.print("Try them on your own script:")
    console.print("  [bold].venv/bin/ditorch run your_script.py[/]", soft_wrap=True)
    console.print("  [bold].venv/bin/op_tools run OpAutoCompare --mode once your_script.py[/]", soft_wrap=True)
    console.print("\nEverything that the faulty run knows, in one page:")
    console.print(f"  [bold]{page}[/]", soft_wrap=True)
    return 0


def act_runs() -> list[float]:
    """The script runs, unchanged."""
    console.print(Rule("1. does it run?", style="cyan"))
    console.print("A training script, written for a CUDA GPU. It does not know about ditorch:\n")
    source = SCRIPT.read_text().splitlines()
    shown = [line for line in source if re.search(r"torch\.cuda\.|\.cuda\(|autocast\(", line)]
    console.print(Syntax("\n".join(line.strip() for line in shown), "python", background_color="default"))
    console.print("\n[bold]$ ditorch run demo/train_gpt.py[/]\n", soft_wrap=True)
    return train("training", ["-m", "ditorch", "run"])


def act_goes_wrong() -> tuple[list[float], str]:
    """A kernel is broken on purpose; the comparison finds it. Returns the losses and the operator that was named."""
    console.print(Rule("2. is it right?", style="cyan"))
    console.print(
        f"Now the device gets a fault, as a young chip may have one: [red]{FAULT}[/]\n"
        "The training goes on, only worse. OpAutoCompare looks at each kind of call of the first step:\n"
    )
    console.print("[bold]$ op_tools run OpAutoCompare --mode once --steps 0:1 demo/train_gpt.py[/]\n", soft_wrap=True)
    said: list[str] = []
    watched = ["-m", "op_tools.cli", "run", "OpAutoCompare", "--mode", "once", "--steps", "0:1", "--out", str(FAULTY)]
    losses = train("training", watched, {"DITORCH_SOFT_FAULTS": FAULT, "OP_TOOLS_CONSOLE": "summary"}, said)
    report = _report(said)
    if not report:
        raise SystemExit("OpAutoCompare found nothing; its output was:\n" + "\n".join(said))
    told = "\n".join(line for line in report if "reproduce it" not in line)
    console.print(Panel(told, title="OpAutoCompare", border_style="red"))
    operator = report[0].split()[2]
    script = next((line.split()[-1] for line in report if "reproduce it" in line), None)
    if script:
        console.print("\nThe call is saved, with a script that repeats it without the model:\n")
        console.print(f"[bold]$ python {script}[/]\n", soft_wrap=True)
        done = subprocess.run(
            [sys.executable, script], cwd=ROOT, env=_environment({"DITORCH_SOFT_FAULTS": FAULT}), stdout=-1, text=True
        )
        console.print("\n".join(f"  {line}" for line in done.stdout.splitlines()), style="dim", soft_wrap=True)
    return losses, operator


def act_repaired(operator: str) -> list[float]:
    """The same faulty device, with the operator that was named moved to the CPU."""
    console.print(Rule("3. go on meanwhile", style="cyan"))
    console.print(f"The same faulty device; only {operator} runs on the CPU until its kernel is repaired:\n")
    console.print(f"[bold]$ op_tools run OpFallback --ops {operator} demo/train_gpt.py[/]\n", soft_wrap=True)
    moved = ["-m", "op_tools.cli", "run", "OpFallback", "--ops", operator]
    return train("training", moved, {"DITORCH_SOFT_FAULTS": FAULT, "OP_TOOLS_CONSOLE": "off"})


def act_page(right: list[float], wrong: list[float]) -> Path:
    """The page of the faulty run, with its losses beside those of the healthy one; returns its path."""
    console.print(Rule("4. look at it", style="cyan"))
    curves = [_losses(name, losses) for name, losses in (("faulty", wrong), ("healthy", right))]
    page = RESULTS / "faulty.html"
    console.print(f"[bold]$ op_tools report {FAULTY} -o {page}[/]\n", soft_wrap=True)
    command = [sys.executable, "-m", "op_tools.cli", "report", str(FAULTY), "-o", str(page), "--loss", *curves]
    subprocess.run(command, cwd=ROOT, env=_environment(None), stdout=-1, check=True)
    return ROOT / page


def _losses(name: str, losses: list[float]) -> str:
    """Losses as `op_tools losscmp` reads them."""
    path = RESULTS / f"{name}.metrics.json"
    records = [{"iteration": step, "total_loss": loss, "losses": [loss]} for step, loss in enumerate(losses)]
    (ROOT / path).write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


def _report(said: list[str]) -> list[str]:
    """The lines of a summary that say who is to blame, without the machine's paths."""
    lines: list[str] = []
    for line in said:
        text = line.strip().replace(str(ROOT) + os.sep, "")
        if text.startswith("first wrong:"):
            lines.append(text)
        elif lines and line.startswith("    "):
            lines.append(f"  {text}")
        elif lines:
            break
    return lines


def _environment(more: dict[str, str] | None) -> dict[str, str]:
    # the story is told on the software accelerator: that is the one which can be made to fail on purpose
    return {**os.environ, "PYTHONPATH": str(ROOT), "DITORCH_DEVICE": "soft", **(more or {})}


def train(
    title: str, how: list[str], environment: dict[str, str] | None = None, said: list[str] | None = None
) -> list[float]:
    """Run the script with a progress bar; its losses. Other lines go to `said`, or are shown."""
    command = [sys.executable, *how, str(SCRIPT.relative_to(ROOT)), "--steps", str(STEPS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=_environment(environment))
    assert process.stdout is not None
    losses: list[float] = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    try:
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(title, total=STEPS, loss="")
            for line in process.stdout:
                match = re.match(r"step (\d+)/(\d+) loss (\S+)", line)
                if match:
                    losses.append(float(match[3]))
                    progress.update(task, completed=int(match[1]), total=int(match[2]), loss=f"{losses[-1]:.3f}")
                elif said is not None:
                    said.append(line.rstrip())
                else:
                    progress.console.print(f"  {line.rstrip()}", style="dim")
    except KeyboardInterrupt:
        process.terminate()
        console.print("stopped")
        raise SystemExit(130) from None
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}; its output is above")
    return losses


if __name__ == "__main__":
    raise SystemExit(main())
