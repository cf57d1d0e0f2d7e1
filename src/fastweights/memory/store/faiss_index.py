"""A memory searched through FAISS."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastweights.checks import check_sizes
from fastweights.memory.store.episodic import EpisodicMemory
from fastweights.memory.store.neighbours import Neighbours
from fastweights.memory.store.ring import Ring, squared_lengths
from fastweights.memory.store.search import count_candidates, find_nearest, make_sure, rank


class FaissIndex:
    """A FAISS index of a memory's keys, for memories that are too large for an exact search at every query.

    FAISS finds candidates; their distances and order are computed from the memory, as `EpisodicMemory.search` does it.
    "Flat" gives the same result as that (of float64 keys up to what float32 can tell apart), others miss neighbours:
    `recall` measures how many. The index follows the memory: a search first removes and adds all changes since the
    last one (an index that cannot remove, such as HNSW, is rebuilt). What an index has learnt of the keys, the cells
    of "IVF", stays until `train`.

    Needs faiss-cpu (`pip install '.[faiss]'` in the checkout); keys and distances there are float32, on the CPU.

    Args:
        store: the memory.
        factory: a string for FAISS's `index_factory`: "Flat", "IVF1024,Flat", "HNSW32".
        probes: the number of cells of an "IVF" index, also of one behind "PCA" or "OPQ", that a query looks through;
            FAISS's own 1 finds little.

    Raises:
        ImportError: FAISS is not installed.
        ValueError: a factory that FAISS does not know, or `probes` less than 1.

    Examples:
        >>> import torch
        >>> from fastweights import memory
        >>> store = memory.EpisodicMemory(1000, 8)
        >>> store.write(torch.randn(500, 8), torch.arange(500))
        >>> index = memory.FaissIndex(store, "Flat")            # doctest: +SKIP
        >>> found = index.search(torch.randn(3, 8), 5)          # doctest: +SKIP
        >>> index.recall(torch.randn(100, 8), neighbours=5)     # doctest: +SKIP
        1.0
    """

    def __init__(self, store: EpisodicMemory, factory: str = "Flat", *, probes: int = 16) -> None:
        try:
            import faiss
        except ImportError as error:
            raise ImportError("FaissIndex needs FAISS: run `pip install '.[faiss]'` in the checkout") from error
        self._faiss: Any = faiss
        check_sizes(probes=probes)
        self.store, self.factory, self.probes = store, factory, probes
        self._build()

    def _build(self) -> None:
        try:
            index = self._faiss.index_factory(self.store.key_size, self.factory)
        except RuntimeError as error:
            raise ValueError(f"FAISS cannot make {self.factory!r} of keys of width {self.store.key_size}") from error
        cells = self._faiss.try_extract_index_ivf(index)  # also of one behind a transformation, "PCA32,IVF1024,Flat"
        if cells is not None:
            cells.nprobe = self.probes
        # IndexIDMap2 takes entries for renumbered when some are removed, and those of cells are not.
        numbered = cells is not None and isinstance(index, (self._faiss.IndexIVF, self._faiss.IndexPreTransform))
        self._index = index if numbered else self._faiss.IndexIDMap2(index)
        self._numbers = np.empty(0, np.int64)  # the entries in the index, ascending
        self._identity = self.store.entries().identity

    def train(self) -> None:
        """Build the index again from the keys that the memory holds now.

        Raises:
            ValueError: the memory is empty, or has too few keys for the index to learn from.
        """
        with self.store.lock:
            self._build()
            self.update()

    def update(self) -> None:
        """Add and remove entries until the index holds those of the memory; a search does it by itself.

        Raises:
            ValueError: as `train`, where the index has never been trained.
        """
        with self.store.lock:
            if self._identity is not self.store.entries().identity:  # converted, or read again
                self._build()
            numbers = self.store.numbers.numpy()
            gone = np.setdiff1d(self._numbers, numbers, assume_unique=True)
            if len(gone):
                try:
                    self._index.remove_ids(gone)
                    self._numbers = np.setdiff1d(self._numbers, gone, assume_unique=True)
                except RuntimeError:  # an index that cannot
                    self._build()
            new = np.flatnonzero(~np.isin(numbers, self._numbers, assume_unique=True))
            if not len(new):
                return
            if not self._index.is_trained:
                try:
                    self._index.train(self._rows(np.arange(len(numbers))))
                except RuntimeError as error:
                    raise ValueError(f"{len(numbers)} keys are too few to train {self.factory!r}: {error}") from error
            for part in np.array_split(new, -(-len(new) // 2**16)):
                self._index.add_with_ids(self._rows(part), numbers[part])
            self._numbers = numbers

    def _rows(self, indices: np.ndarray) -> np.ndarray:
        ring = self.store.entries()
        keys = ring.keys_at(torch.from_numpy(indices).to(ring.keys.device))
        return np.asarray(keys.float().cpu().numpy())

    def search(self, queries: Any, neighbours: int, *, epsilon: float = 1e-3) -> Neighbours:
        """Return the nearest entries among those that the index finds, like `EpisodicMemory.search`.

        A query for which the index finds too few is searched for exactly.

        Args:
            queries: [Q,d]
            neighbours: K
            epsilon: of the kernel.

        Raises:
            ValueError: as `EpisodicMemory.search` and `update`.
        """
        return self.store.search_with(queries, neighbours, epsilon, self.find_nearest)

    def find_nearest(self, ring: Ring, queries: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return indices and squared distances [Q,count] of what the index finds nearest to queries [Q,d]."""
        self.update()
        wanted = count_candidates(ring, count)
        self._faiss.omp_set_num_threads(torch.get_num_threads())
        scores, numbers = self._index.search(queries.float().cpu().numpy(), wanted)
        missed = torch.from_numpy((numbers < 0).any(1)).to(queries.device)
        candidates = torch.from_numpy(np.searchsorted(self._numbers, np.maximum(numbers, self._numbers[0])))
        computed = queries.to(ring.lengths.dtype)
        distances, indices = rank(ring, computed, candidates.to(queries.device), count)
        if bool(missed.any()):
            indices[missed], distances[missed] = find_nearest(ring, queries[missed], count)
        elif self.factory == "Flat" and wanted < ring.count and queries.dtype != torch.float64:
            lengths = squared_lengths(computed)
            limits = torch.from_numpy(scores[:, -1]).to(queries.device) - lengths
            make_sure(ring, computed, distances, indices, limits, ring.longest_key())
        return indices, distances

    def recall(self, queries: Any, neighbours: int) -> float:
        """Return the share of the nearest entries that the index finds: queries [Q,d], `neighbours` K.

        Raises:
            ValueError: as `search`.
        """
        with self.store.lock:
            ours = self.search(queries, neighbours).indices
            true = self.store.search(queries, neighbours).indices
        return float((ours[:, :, None] == true[:, None, :]).any(2).double().mean())
