"""`python -m op_tools` is the command `op_tools`."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
