import sys

from fastweights.cli import main

sys.exit(main())
