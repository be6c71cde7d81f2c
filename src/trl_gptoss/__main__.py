"""`python -m trl_gptoss`: the same as `trl-gptoss`, with the interpreter that is meant."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
