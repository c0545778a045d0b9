"""`stubs.py FOLDER`: libraries that stand in for NVIDIA's, so that PyTorch's CUDA wheel is imported without them.

The wheel of PyTorch is half a gigabyte and the packages of NVIDIA that it asks for are three. Without a GPU nothing of
them is used but their names: each library that PyTorch's own libraries name and that is missing is made, with the
functions that they expect. Every function answers 100, which is CUDA's error "no device".
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path


def _read(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def make(libraries: Path) -> list[str]:
    """Put the missing libraries beside PyTorch's own (`make(Path(".../torch/lib"))`); their names."""
    present = sorted(path for path in libraries.glob("*.so*") if path.is_file())
    defined: set[str] = set()
    wanted: dict[str, str] = {}  # symbol: version, "" if it has none
    needed: set[str] = set()
    versions: dict[str, str] = {}  # version: the library that has it
    for path in present:
        needed.update(re.findall(r"\(NEEDED\).*\[(.*)\]", _read("readelf", "-dW", str(path))))
        named = ""
        for line in _read("readelf", "-VW", str(path)).splitlines():
            if match := re.search(r"Version: \d+ +File: (\S+)", line):
                named = match[1]
            elif (match := re.search(r"Name: (\S+) +Flags", line)) and named:
                versions[match[1]] = named
        for line in _read("readelf", "--dyn-syms", "-W", str(path)).splitlines():
            part = line.split()
            if len(part) < 8 or part[4] not in ("GLOBAL", "WEAK"):
                continue
            name, _, version = part[7].partition("@")
            if part[6] != "UND":
                defined.add(name)
            elif part[4] == "GLOBAL":
                wanted[name] = version.lstrip("@")
    here = {path.name for path in present}
    missing = sorted(name for name in needed - here if re.match(r"libcu|libnv|libnccl", name))
    if not missing:
        return []
    symbols: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, version in wanted.items():
        library = versions.get(version, "") if version else missing[0]
        if library in missing and (version or (name not in defined and not name.startswith(("Py", "_Py")))):
            symbols[library].append((name, version))
    for library in missing:
        _build(libraries / library, symbols[library])
    return missing


def _build(target: Path, symbols: list[tuple[str, str]]) -> None:
    source, script = target.with_suffix(".s"), target.with_suffix(".map")
    lines = [".text", "answer: movl $100, %eax", "ret"]
    lines += [f".globl {name}\n.type {name},@function\n.set {name}, answer" for name, _ in symbols]
    source.write_text("\n".join(lines) + '\n.section .note.GNU-stack,"",@progbits\n')
    by_version: defaultdict[str, list[str]] = defaultdict(list)
    for name, version in symbols:
        by_version[version].append(name)
    by_version.pop("", None)  # a name that the script does not list has no version
    script.write_text(
        "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in by_version.items())
    )
    command = ["gcc", "-shared", "-nostdlib", "-o", str(target), str(source), f"-Wl,-soname,{target.name}"]
    if by_version:
        command.append(f"-Wl,--version-script,{script}")
    subprocess.run(command, check=True)
    source.unlink()
    script.unlink()


if __name__ == "__main__":
    print("\n".join(make(Path(sys.argv[1]))))
