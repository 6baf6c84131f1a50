"""`python -m tiledsched` is `tiledsched`."""

import sys

from tiledsched.cli import main

if __name__ == "__main__":
    sys.exit(main())
