"""Put the table and the members of a run into docs/results; then `python docs/fill.py` writes its pages there.

python docs/publish.py RUN NAME
"""

import sys
from pathlib import Path

from fastweights.runs import publish

if __name__ == "__main__":
    publish(Path(sys.argv[1]), Path(__file__).parent / "results" / sys.argv[2])
