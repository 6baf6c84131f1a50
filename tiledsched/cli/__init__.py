"""The command line: parse, call, print. No logic lives here."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from tiledsched.errors import TiledschedError

INTERRUPTED = 130


class _Stderr(logging.StreamHandler):
    """Writes to what stderr is by then: above the bars of a tune, where there are any, which would else wipe it out."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        self.stream = sys.stderr
        super().emit(record)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code: 0 done, 1 no valid schedule or a regression, 2 usage, 130 interrupted."""
    from tiledsched.cli.parser import parse

    try:
        options = parse(sys.argv[1:] if arguments is None else list(arguments))
        logging.basicConfig(handlers=[_Stderr()], format="%(levelname)s %(name)s: %(message)s",
                            level=logging.DEBUG if options.verbose else logging.WARNING)  # fmt: skip
        return int(options.run(options))
    except TiledschedError as error:
        print(f"tiledsched: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("tiledsched: interrupted; everything finished so far is stored, run again to go on", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader (head, less) has gone
        return 0


if __name__ == "__main__":
    sys.exit(main())
