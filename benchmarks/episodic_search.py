"""Time the exact search of a memory beside FAISS's flat index: `PYTHONPATH=src python benchmarks/episodic_search.py`.

Needs faiss-cpu. 400,000 random keys of 256 numbers, the 50 nearest, for 1, 16 and 256 queries; FAISS as it comes, and
with matrix products for any number of queries (`distance_compute_blas_threshold`, which decides by itself in some
versions to go without them for hundreds of queries). The ratio is to the faster of the two. Rivals take turns in one
process; a time is the median of the rounds. Nothing is timed unless both find the same entries: FAISS orders by
distances in float32, so that one in ten thousand may be in another's place.
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # two pools of threads that spin would slow one another down

import faiss
import torch

from fastweights import memory
from fastweights.bench.run import append_csv, machine_columns
from fastweights.timing import medians

OURS, PLAIN, PRODUCTS = "fastweights", "faiss flat", "faiss flat, matrix products"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--entries", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".csv"))
    options = parser.parse_args()
    torch.manual_seed(0)
    size, neighbours = 256, 50
    store = memory.EpisodicMemory(options.entries, size)
    for part in torch.arange(options.entries).split(50_000):
        store.write(torch.randn(len(part), size), part)
    index = faiss.IndexFlatL2(size)
    index.add(store.keys.numpy())
    automatic = faiss.cvar.distance_compute_blas_threshold
    machine = {name: cell for name, cell in machine_columns().items() if name != "kernel"}
    for threads in options.threads:
        torch.set_num_threads(threads)
        faiss.omp_set_num_threads(threads)
        for count in (1, 16, 256):
            queries = torch.randn(count, size)

            def flat(threshold: int, queries: torch.Tensor = queries) -> torch.Tensor:
                faiss.cvar.distance_compute_blas_threshold = threshold
                return torch.from_numpy(index.search(queries.numpy(), neighbours)[1])

            def ours(queries: torch.Tensor = queries) -> torch.Tensor:
                return store.search(queries, neighbours).indices

            same = float((ours() == flat(1)).double().mean())
            if same < 0.999:
                raise SystemExit(
                    f"only {same:.4f} of the neighbours of {count} queries agree with FAISS: nothing is timed"
                )
            rivals = {OURS: ours, PLAIN: lambda: flat(automatic), PRODUCTS: lambda: flat(1)}
            times = medians(rivals, options.rounds, budget=100)
            best = min(times[PLAIN].milliseconds, times[PRODUCTS].milliseconds)
            rows = [
                machine
                | {
                    "faiss": faiss.__version__,
                    "threads": threads,
                    "entries": options.entries,
                    "key_size": size,
                    "queries": count,
                }
                | {"neighbours": neighbours, "agreement": round(same, 5), "rival": rival}
                | {"milliseconds": round(taken, 2), "ratio_to_faiss": round(taken / best, 4), "rounds": rounds}
                for rival, (taken, rounds) in times.items()
            ]
            append_csv(options.output, rows)
            shown = "threads", "queries", "rival", "milliseconds", "ratio_to_faiss", "rounds"
            for row in rows:
                print(*(row[name] for name in shown))


if __name__ == "__main__":
    main()
