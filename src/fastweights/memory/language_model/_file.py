"""The file of a saved language model's memory, `language_model.json`, beside the files of the memory itself."""

import json
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn

from fastweights.errors import MemoryFileError
from fastweights.files import encode_json, find_marked, write_files
from fastweights.memory.language_model._causal_model import CausalModel, check_tokenizer, fingerprint_tokenizer
from fastweights.memory.language_model._components import BUILT_IN, Component, check_readers
from fastweights.memory.predictors.predictor import Reader
from fastweights.memory.store.faiss_index import FaissIndex
from fastweights.memory.store.saved import MEMORY

if TYPE_CHECKING:
    from fastweights.memory.language_model.adaptive_language_model import AdaptiveLanguageModel

    Model = TypeVar("Model", bound="AdaptiveLanguageModel")

FORMAT = "fastweights adaptive language model 1"
FILE = "language_model.json"


def save(
    lm: "AdaptiveLanguageModel",
    network: CausalModel,
    components: Sequence[Component],
    folder: str | PathLike[str],
    beside: Mapping[str, bytes],
) -> None:
    """Write the memory, the settings and other files: an error leaves all that are there."""
    from fastweights.memory.store.disk import read_mark  # needs safetensors

    path = Path(folder) / FILE
    facts = describe(lm, network, components)
    memory = path.parent / MEMORY
    there = find_marked(path, read_mark(memory)) if memory.exists() else path
    if there.exists():
        check_same(path, read(there), facts)
    elif memory.exists():
        raise MemoryFileError(f"{path.parent} holds a memory that is no language model's: choose another folder")
    files = {FILE: encode_json(facts), **beside}
    if not lm.store.writes_to(folder):
        lm.store.save(folder, beside=files)
        return
    try:  # the memory is there already
        write_files({path.parent / name: contents for name, contents in files.items()})
    except OSError as error:
        raise MemoryFileError(f"cannot write {path}: {error.strerror or error}") from error


def describe(lm: "AdaptiveLanguageModel", network: CausalModel, components: Sequence[Component]) -> dict[str, Any]:
    """Return all settings, and checksums of the model and of the tokenizer."""
    index = None if lm.knn is None else lm.knn.index
    there = {each.name: each.describe() for each in components}
    return {
        "format": FORMAT,
        "model": network.fingerprint(),
        "model_class": type(lm.model).__name__,
        "tokenizer": None if lm.tokenizer is None else fingerprint_tokenizer(lm.tokenizer),
        "bos_token_id": network.bos_token_id,
        "weights": None if lm.weights is None else lm.weights.tolist(),
        **{kind.name: there.get(kind.name) for kind in BUILT_IN},
        "index": {"factory": index.factory, "probes": index.probes} if isinstance(index, FaissIndex) else None,
        **({"readers": list(lm.readers)} if lm.readers else {}),
    }


def read(path: Path) -> dict[str, Any]:
    """Return what is saved."""
    try:
        facts = json.loads(path.read_bytes())
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        if not isinstance(facts.setdefault("readers", []), list):
            raise ValueError("its readers are no list")
    except FileNotFoundError as error:
        raise MemoryFileError(
            f"{path.parent} holds no memory of a language model, there is no {FILE}: save_pretrained() one there first"
        ) from error
    except OSError as error:
        raise MemoryFileError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise MemoryFileError(f"{path} is damaged ({error}): put a good copy of the whole folder there") from error
    return facts


def check_same(path: Path, saved: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuse the memory of another model or tokenizer."""
    if saved.get("model") != ours["model"]:
        raise MemoryFileError(
            f"{path.parent} holds the memory of another model, a {saved.get('model_class')}: the model must have the "
            "weights and the precision that it had then, for what was stored are its hidden states"
        )
    if saved.get("tokenizer") and ours["tokenizer"] and saved["tokenizer"] != ours["tokenizer"]:
        raise MemoryFileError(f"{path.parent} holds a memory that was written with another tokenizer")


def _name(readers: Iterable[object]) -> str:
    return f"the readers {', '.join(map(repr, readers))}" if readers else "no readers"


def load(
    cls: "type[Model]",
    model: nn.Module,
    folder: str | PathLike[str],
    tokenizer: Any,
    given: Mapping[str, Reader] | None,
    read_store: Any,
) -> "Model":
    """Return the saved one around a model and with the readers given, after comparing them."""
    path = Path(folder) / FILE
    if not (path.parent / MEMORY).exists():
        read(path)  # which refuses a folder that has neither
    readers = check_readers(given)
    network = CausalModel(model)
    if tokenizer is not None:
        check_tokenizer(tokenizer, network.classes)
    ours = {
        "model": network.fingerprint(),
        "tokenizer": None if tokenizer is None else fingerprint_tokenizer(tokenizer),
    }

    def read_facts(path: Path) -> dict[str, Any]:
        facts = read(path)
        check_same(path, facts, ours)
        saved = facts["readers"]
        if sorted(map(str, saved)) != sorted(readers):
            raise MemoryFileError(
                f"{path.parent} holds the memory of a model with {_name(saved)}, got {_name(readers)}: give readers= "
                "with the names that it was saved with"
            )
        return facts

    store = read_store(folder, device=network.device)
    try:
        facts, _ = store.read_beside(FILE, read_facts)
    except BaseException:
        store.close()
        raise
    try:
        index = store if facts["index"] is None else FaissIndex(store, **facts["index"])
        facts.setdefault("ngram", None)  # an earlier version wrote none
        return cls(
            model,
            **{kind.name: facts[kind.name] and kind.load(facts[kind.name], network, index) for kind in BUILT_IN},
            readers={name: readers[name] for name in facts["readers"]},  # in the order of the weights
            weights=facts["weights"],
            store=store,
            tokenizer=tokenizer,
            bos_token_id=facts.get("bos_token_id"),  # an earlier version wrote none, and had none
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        store.close()
        raise MemoryFileError(f"{path} is damaged ({error}): put a good copy of the whole folder there") from error
