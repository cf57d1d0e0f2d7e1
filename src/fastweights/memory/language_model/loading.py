"""Causal language models of transformers: loaded from a folder, from a file of llama.cpp, or from the hub."""

import os
from pathlib import Path
from typing import Any

import torch

from fastweights.errors import FastWeightsError, one_line


def load_language_model(name: str) -> tuple[Any, Any]:
    """Return a causal language model of transformers in evaluation mode, and its tokenizer.

    Args:
        name: a local folder, a file of llama.cpp (.gguf), or a name on the hub, where there is a network.

    Raises:
        FastWeightsError: there is no such model, it cannot be read, or transformers is not installed.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise FastWeightsError("language models need transformers: run `pip install '.[hf]'`") from error
    place, options = _find_language_model(name)
    gguf = "gguf_file" in options
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it only warns of missing weights, in a table, and makes them random
    try:
        if not gguf and AutoConfig.from_pretrained(place, **options).is_encoder_decoder:
            raise FastWeightsError(f"{name} is an encoder-decoder: give a causal language model")
        tokenizer = AutoTokenizer.from_pretrained(place, **options)
        dtype = torch.float32 if gguf else "auto"
        model, info = AutoModelForCausalLM.from_pretrained(place, **options, dtype=dtype, output_loading_info=True)
    except FastWeightsError:
        raise
    except Exception as error:  # the readers of damaged files raise errors of any type
        raise FastWeightsError(f"cannot load the language model {name}: {one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    if missing := sorted(info["missing_keys"]):
        raise FastWeightsError(
            f"{name} has no weights for {missing[0]}{f' and {len(missing) - 1} more' if missing[1:] else ''}: give a "
            "causal language model with its output embedding"
        )
    return model.eval(), tokenizer


def _find_language_model(name: str) -> tuple[str, dict[str, Any]]:
    """Return the place of a language model, and options for those who read it there."""
    path = Path(os.path.expanduser(name))
    if path.suffix == ".gguf":
        if not path.is_file():
            raise FastWeightsError(f"there is no file {name}")
        return str(path.parent), {"gguf_file": path.name}
    if path.exists():
        if not (path / "config.json").is_file():
            raise FastWeightsError(
                f"{name} holds no language model: there is no config.json in it: give a folder of save_pretrained(), a "
                ".gguf file, or a name on the hub"
            )
        return str(path), {}
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().model_info(name, timeout=10)
    except (HFValidationError, RepositoryNotFoundError) as error:
        raise FastWeightsError(f"there is no folder {name}, and no such model on the hub") from error
    except Exception as error:  # no network: each client of the hub's library raises its own error
        if not _is_cached(name):
            raise FastWeightsError(
                f"there is no folder {name}, the hub cannot be asked for it, and it was not loaded from there before"
            ) from error
        return name, {"local_files_only": True}  # or each of its files would be asked for, again and again
    return name, {}


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)
