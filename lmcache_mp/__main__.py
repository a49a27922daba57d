"""``python -m lmcache_mp``: the command ``lmcache-mp``."""

import sys

from lmcache_mp.cli import main

if __name__ == "__main__":
    sys.exit(main())
