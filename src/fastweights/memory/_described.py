"""What there is in a memory, to be looked at."""

import torch
from torch import Tensor

from fastweights.memory._state import State


class Described:
    """The sizes, the entries and the open tags of a memory's state."""

    _state: State

    @property
    def capacity(self) -> int:
        """N."""
        return self._state.ring.capacity

    @property
    def key_size(self) -> int:
        """d."""
        return self._state.ring.keys.shape[1]

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Of one value."""
        return tuple(self._state.ring.values.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        """Of the keys."""
        return self._state.ring.keys.dtype

    @property
    def value_dtype(self) -> torch.dtype:
        """Of the values."""
        return self._state.ring.values.dtype

    @property
    def device(self) -> torch.device:
        """Of keys and values."""
        return self._state.ring.keys.device

    def __len__(self) -> int:
        return self._state.ring.count

    @property
    def keys(self) -> Tensor:
        """[len,d], oldest first, to be read only: a view, or a copy once the oldest entries have been overwritten."""
        return self._state.ring.ordered(self._state.ring.keys)

    @property
    def values(self) -> Tensor:
        """[len,*value_shape], oldest first, to be read only, like `keys`."""
        return self._state.ring.ordered(self._state.ring.values)

    @property
    def numbers(self) -> Tensor:
        """[len] int64 on the CPU, ascending: the how manyth entry each was that was ever written; never used again."""
        return torch.from_numpy(self._state.ring.ordered_numbers())

    @property
    def tags(self) -> tuple[str, ...]:
        """The open tags, in the order in which they were opened."""
        return tuple(self._state.history.names.values())

    def __repr__(self) -> str:
        values = f"{list(self.value_shape)} " if self.value_shape else ""
        return (
            f"EpisodicMemory({len(self):,} of {self.capacity:,} entries, key_size={self.key_size}, {self.dtype}, "
            f"values {values}{self.value_dtype}, {self.device})"
        )
