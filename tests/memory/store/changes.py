"""Random changes, made to a memory and to the model of one."""

import torch
from hypothesis import strategies as st

KEY_SIZE = 2
small = st.integers(-2, 2)  # few values: many keys are equal, many distances too
writes = st.tuples(
    st.just("write"),
    st.lists(st.tuples(small, small, st.integers(0, 2)), max_size=9),
    st.sampled_from([None, None, "a", "b", "c"]),
)
change = st.one_of(
    writes,
    writes,
    writes,
    st.tuples(st.just("remove"), st.lists(st.integers(0, 7), min_size=1, max_size=4)),
    st.tuples(st.just("remove_class"), st.integers(0, 2)),
    st.tuples(st.just("rename_class"), st.integers(0, 2), st.integers(0, 2)),
    st.tuples(st.sampled_from(["undo", "undo", "keep"]), st.sampled_from(["a", "b", "c"])),
    st.tuples(st.just("clear")) | writes,
)


def make(store, model, change):
    """One change of both; what cannot be done is left out."""
    name, *given = change
    if name == "write":
        keys = [(float(a), float(b)) for a, b, _ in given[0]]
        values = [value for _, _, value in given[0]]
        store.write(torch.tensor(keys).view(-1, KEY_SIZE), torch.tensor(values, dtype=torch.long), tag=given[1])
        model.write(keys, values, given[1])
    elif name == "remove":
        indices = [index for index in given[0] if index < len(store)]
        if indices:
            store.remove(torch.tensor(indices))
            model.remove(indices)
    elif name in ("undo", "keep"):
        if given[0] in store.tags:
            getattr(store, name)(given[0])
            getattr(model, name)(given[0])
    else:
        getattr(store, name)(*given)
        getattr(model, name)(*given)


def content(store):
    return [(tuple(key), value) for key, value in zip(store.keys.tolist(), store.values.tolist(), strict=True)]


def expected(model):
    return [(key, value) for _, key, value in model.entries()]
