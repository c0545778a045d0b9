"""The demonstration that ``make demo`` runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax

from .chart import chart

HERE = Path(__file__).parent
ROOT = HERE.parent
STEPS = 150
console = Console(highlight=False)


def main() -> int:
    console.print(
        Panel(
            "[bold]ditorch[/]: PyTorch code written for CUDA runs on the accelerator that a machine has.\n"
            "Where there is none, as on a laptop, on the software accelerator that ditorch brings.",
            border_style="cyan",
        )
    )
    console.print("\nA training script, written for a CUDA GPU. It does not know about ditorch:\n")
    source = (HERE / "train_gpt.py").read_text().splitlines()
    shown = [line for line in source if re.search(r"torch\.cuda\.|\.cuda\(|autocast\(", line)]
    console.print(Syntax("\n".join(line.strip() for line in shown), "python", background_color="default"))
    console.print("\n[bold]$ ditorch run demo/train_gpt.py[/]\n")
    losses = train("training")
    console.print(chart({"loss": ("green", losses)}))
    console.print(
        f"\nloss {losses[0]:.3f} → [bold]{losses[-1]:.3f}[/] in {len(losses)} steps. "
        "Try it on your own script: [bold].venv/bin/ditorch run your_script.py[/]"
    )
    return 0


def train(title: str, *options: str, environment: dict[str, str] | None = None) -> list[float]:
    """Run the script through ditorch with a progress bar; its losses."""
    command = [sys.executable, "-m", "ditorch", "run", str(HERE / "train_gpt.py"), "--steps", str(STEPS), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **(environment or {})}
    )
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
