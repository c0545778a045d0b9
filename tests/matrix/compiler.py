"""`compiler.py FOLDER g++ ARGUMENTS`: the compiler, which keeps objects whose preprocessed source it has seen.

The environments of one release of PyTorch share its headers, so what does not include Python's is compiled once, and
without optimisation: whether it compiles and works is the question here, and it takes half as long.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from pathlib import Path


def main(kept: Path, compiler: str, arguments: list[str]) -> int:
    """Run the compiler, or copy what it made before; its exit code."""
    if "-c" not in arguments:
        return subprocess.call([compiler, *arguments])
    place = arguments.index("-o")
    target, rest = Path(arguments[place + 1]), arguments[:place] + arguments[place + 2 :]
    asked = subprocess.run(
        [compiler, "-E", "-P", *(part for part in rest if part != "-c")], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        return subprocess.call([compiler, *arguments])
    source = re.sub(r'"[^"\n]*/site-packages/', '"', asked.stdout)  # in the messages of assertions
    flags = [part for part in rest if part.startswith("-") and not part.startswith("-isystem")]
    there = kept / (hashlib.sha256(repr((compiler, flags, source)).encode()).hexdigest()[:32] + ".o")
    if not there.exists():
        plain = ["-O0" if re.fullmatch(r"-O[1-3s]", part) else part for part in arguments]
        code = subprocess.call([compiler, *plain])
        if code:
            return code
        shutil.copy(target, there)
    shutil.copy(there, target)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
