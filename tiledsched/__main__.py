"""`python -m tiledsched` is `tiledsched`."""

import os
import sys

# -m puts the current directory first on the path. It goes last, unless this package is read from there: no file that lies there
# may stand in for an installed module. `os` and `sys` are loaded by then in any case.
if not getattr(sys.flags, "safe_path", False) and sys.path[0] == os.getcwd() != os.path.dirname(
    os.path.dirname(__file__)
):
    sys.path.append(sys.path.pop(0))

from tiledsched.cli import main

if __name__ == "__main__":
    sys.exit(main())
