"""What a memory has to be, written once more: a list of changes that is gone through from the start every time."""

import numpy as np


class Model:
    """No ring, no numbers, nothing held aside: to undo a tag is to strike its writes out of the list."""

    def __init__(self, capacity):
        self.capacity = capacity
        # ("write", [(identity, key, value)], tag), ("remove", identities), ("class", value), ("rename", value, other)
        self.changes = []
        self.written = 0

    def entries(self):
        """[(identity, key, value)], oldest first."""
        now = []
        for change in self.changes:
            if change[0] == "write":
                for entry in change[1]:
                    now.append(entry)
                    if len(now) > self.capacity:
                        now.pop(0)
            elif change[0] == "remove":
                now = [entry for entry in now if entry[0] not in change[1]]
            elif change[0] == "rename":
                now = [(*entry[:2], change[2]) if entry[2] == change[1] else entry for entry in now]
            else:
                now = [entry for entry in now if entry[2] != change[1]]
        return now

    @property
    def tags(self):
        return {change[2] for change in self.changes if change[0] == "write"} - {None}

    def write(self, keys, values, tag=None):
        new = [(self.written + i, tuple(key), value) for i, (key, value) in enumerate(zip(keys, values, strict=True))]
        self.written += len(new)
        if new:
            self.changes.append(("write", new, tag))

    def remove(self, indices):
        now = self.entries()
        self.changes.append(("remove", {now[index][0] for index in indices}))

    def remove_class(self, value):
        self.changes.append(("class", value))

    def rename_class(self, value, other):
        self.changes.append(("rename", value, other))

    def undo(self, tag):
        self.changes = [change for change in self.changes if change[0] != "write" or change[2] != tag]

    def keep(self, tag):
        self.changes = [
            (change[0], change[1], None) if change[0] == "write" and change[2] == tag else change
            for change in self.changes
        ]

    def clear(self):
        self.changes = []

    def search(self, query, count):
        return brute_force([key for _, key, _ in self.entries()], [query], count)


def brute_force(keys, queries, count):
    """Indices and squared distances [Q,K]: by distance, then by index."""
    indices, distances = [], []
    for query in np.asarray(queries, np.float64):
        all_distances = [float(((np.asarray(key, np.float64) - query) ** 2).sum()) for key in keys]
        order = sorted(range(len(all_distances)), key=lambda i: (all_distances[i], i))[:count]
        indices.append(order)
        distances.append([all_distances[i] for i in order])
    return np.array(indices), np.array(distances)
