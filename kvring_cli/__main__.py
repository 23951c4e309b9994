"""Where the command `kvring` begins: a Ctrl-C while it is still being imported ends it as quietly as one later."""

from __future__ import annotations

import sys


def main() -> None:
    """The entry point."""
    try:
        from kvring_cli import app
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    app.main()


if __name__ == "__main__":
    main()
