"""`python -m tiledsched` is `tiledsched`."""

import os
import sys

if not getattr(sys.flags, "safe_path", False) and sys.path[0] == os.getcwd() != os.path.dirname(
    os.path.dirname(__file__)
):
    sys.path.append(
        sys.path.pop(0)
    )  # -m puts the current directory first: no file there stands in for an installed module

from tiledsched.cli import main

if __name__ == "__main__":
    sys.exit(main())
