"""Models in a folder that people share: weights as safetensors and settings as JSON, of which nothing is executed."""

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn

from fastweights import __version__
from fastweights.checks import to_plain
from fastweights.errors import FastWeightsError, WeightsError, did_you_mean, one_line
from fastweights.files import alone_in, encode_json, find_marked, name_part, put_marked, write_files, write_part
from fastweights.hub import CARD, FOLDER, Shared, find_card, find_folder, write_card

CONFIG, WEIGHTS = "config.json", "model.safetensors"
MEND = "put a good copy in its place"
# Where models lie that have a name: in the package, in the repository that it is run from, and in one that it was
# installed from.
_PUBLISHED = (Path(__file__).with_name("weights"), Path(__file__).parents[2] / "models", Path("models"))
_COUNTS = ("blocks", "num_layers")  # settings that count tensors: a model has at least one for each
_OF_THE_MACHINE = ("device", "dtype")  # arguments that the weights themselves have
# Layers of torch's own that a setting may be, by how a description names them, with the arguments that each has.
_OF_TORCH = {f"torch.nn.{kind.__name__}": kind for kind in (nn.LSTM, nn.GRU, nn.RNN)}
_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")

Description = dict[str, Any]  # {"class": name, "settings": arguments}, the latter plain values and descriptions
Made = TypeVar("Made", bound="Pretrained")


class Pretrained(Shared):
    """A base class for layers, networks and classifiers that can be saved with their settings, and shared.

    It notes the arguments of its constructor, of a subclass's own too; an attribute or a property of an argument's name
    says what it is now, unless the constructor made something else of it. So a model of your own that derives from it
    and from `torch.nn.Module` is saved as ours are, if its arguments are numbers, words, lists or dicts of them,
    dataclasses of them that the constructor's annotations name, an LSTM, GRU or RNN of `torch.nn`, or again
    `Pretrained`.

    Examples:
        >>> import tempfile, torch
        >>> from fastweights import nn
        >>> from fastweights.pretrained import Pretrained
        >>> class Tagger(Pretrained, torch.nn.Module):
        ...     def __init__(self, features, tags):
        ...         super().__init__()
        ...         self.layer = nn.FastWeightsRNN(features, 20)
        ...         self.output = torch.nn.Linear(20, tags)
        ...     def forward(self, x):                             # [T,B,D] -> [T,B,tags]
        ...         return self.output(self.layer(x)[0])
        >>> tagger, folder, x = Tagger(5, tags=3).eval(), tempfile.mkdtemp(), torch.randn(7, 2, 5)
        >>> tagger.save_pretrained(folder)
        >>> torch.equal(Tagger.from_pretrained(folder)(x), tagger(x))
        True
        >>> tagger.settings
        {'features': 5, 'tags': 3}

    Attributes:
        about: what is known of its training, such as the seed: plain values, which are saved and loaded with it.
    """

    about: Mapping[str, Any] = MappingProxyType({})
    _arguments: dict[str, Any]
    # Arguments that the constructor kept as they were: their attributes say what they are now.
    _kept: frozenset[str] = frozenset()
    # Arguments that a user may expect of such a class and that it lacks, each with what to do in its place.
    _absent: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _noting_arguments(cls.__init__)  # type: ignore[method-assign]

    @property
    def settings(self) -> dict[str, Any]:
        """The constructor's arguments as they are now, but for device and dtype: plain values, as JSON has them.

        Raises:
            WeightsError: one of them is a module that is neither `Pretrained` nor an LSTM, GRU or RNN of `torch.nn`, or
                another object.
        """
        hints = _find_hints(type(self).__init__)
        settings = {}
        for name, value in self._present_arguments():
            if _is_record(value) and _find_record(hints.get(name)) is not type(value):
                raise WeightsError(
                    f"{name} of this {type(self).__name__} is a {type(value).__name__}, and is to be one again once "
                    f"loaded: write `{name}: {type(value).__name__}` in the constructor, and define it in a module"
                )
            settings[name] = _encode(self, name, value)
        return settings

    def save_pretrained(self, folder: str | os.PathLike[str], *, card: str | None = None) -> None:
        """Write `config.json`, `model.safetensors` and a model card, `README.md`, to a folder; it is made.

        Weights that are shared are written once, each in its own dtype.

        Args:
            folder: what is saved there is replaced in one step, but for a card, which stays unless `card` is given.
            card: the model card, as `fastweights.report.model_card` writes it from a run; None is a plain one.

        Raises:
            WeightsError: a setting cannot be written as JSON, the weights are not those that the settings build, or the
                disk refuses; what was there before is whole.
        """
        from safetensors.torch import save

        target = Path(folder).expanduser()
        description = _describe(self)
        # Metadata of one name: of several the order is drawn, and the same model would give other bytes.
        weights = save(_pick_weights(self, target), {"format": "pt"})
        digest = hashlib.sha256(weights).hexdigest()
        config = {**description, "fastweights": __version__, "weights": {"file": WEIGHTS, "sha256": digest}}
        if self.about:
            config["about"] = _encode(self, "about", dict(self.about))
        files = {target / WEIGHTS: weights}
        if chosen := find_card(target, card, write_model_card(self, licence=self.settings.get("licence") or None)):
            files[target / CARD] = chosen.encode()
        try:
            target.mkdir(parents=True, exist_ok=True)
            with alone_in(target):
                try:
                    for path, contents in files.items():
                        write_part(name_part(path, digest), path, contents)
                    write_files({target / CONFIG: encode_json(config)})
                finally:
                    put_marked(target, _read_digest(target))
        except OSError as error:
            raise WeightsError(f"cannot write {target}: {error.strerror}; what was there before is whole") from error

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], *, device: Any = None, **download: Any) -> Self:
        """Load what `save_pretrained` or `push_to_hub` has written, in evaluation mode: the same weights bit for bit.

        Args:
            name: a folder, "owner/name" on a hub, or the name of a model that comes with the package or lies in
                `models/` of its repository, such as "omniglot".
            device: the device of the weights; None is the CPU.
            download: `revision`, `token`, `cache_dir` and `local_files_only` of a download, as
                `huggingface_hub.snapshot_download` takes them.

        Raises:
            WeightsError: the folder has no such model, or one of another class, or is damaged.
            HubError: there is neither a folder nor a model on the hub of that name, huggingface_hub is not installed,
                or the hub refuses or cannot be reached.
        """
        published = None if Path(name, CONFIG).is_file() else find_published(name)
        folder = find_folder(published or name, (CONFIG, WEIGHTS), **download)
        config, model = _load_whole(cls, folder, device)
        if "about" in config:
            model.about = config["about"]
        return model

    def _weighted(self) -> nn.Module:
        """Return the module that has the weights."""
        assert isinstance(self, nn.Module)
        return self

    def _present_arguments(self) -> Iterator[tuple[str, Any]]:
        """Yield the name of each argument, with what the attribute of that name has become of it."""
        for name, value in self._arguments.items():
            if name in _OF_THE_MACHINE:
                continue
            now = getattr(self, name, None)
            changed = isinstance(now, Pretrained) if isinstance(value, Pretrained) else name in self._kept
            yield name, now if changed else value


def find_published(name: str | os.PathLike[str]) -> Path | None:
    """Return the folder of a model that comes with the package or its repository, by its name, or None."""
    if Path(name).name != str(name):
        return None
    return next((root / name for root in _PUBLISHED if (root / name / CONFIG).is_file()), None)


def write_model_card(model: Pretrained, more: str | None = None, *, licence: str | None = None) -> str:
    """Return a model card: the model, how it is loaded, its settings, and what else is known of it, as Markdown."""
    kind = type(model)
    public = ".".join(kind.__module__.split(".")[:2])
    module = public if hasattr(sys.modules.get(public), kind.__name__) else kind.__module__  # where a user finds it
    load = f'model = {kind.__name__}.from_pretrained("{FOLDER}")'
    words = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0]
    settings = f"Its settings:\n\n```json\n{json.dumps(model.settings, indent=2)}\n```"
    return write_card(
        kind.__name__,
        f"{words}\n\n{settings}",
        f"from {module} import {kind.__name__}\n\n{load}",
        more,
        licence=licence,
    )


def _describe(model: Pretrained) -> Description:
    """Return how to build a model again, as JSON has it."""
    return {"class": type(model).__name__, "settings": model.settings}


def is_description(value: object) -> bool:
    """Return whether something that JSON had says how to build a model: by a class and settings."""
    return isinstance(value, dict) and isinstance(value.get("class"), str) and isinstance(value.get("settings"), dict)


def _pick_weights(model: Pretrained, target: Path) -> dict[str, Tensor]:
    """Return the tensors of a model by name, those that are shared once, as they are written."""
    ours = model._weighted().state_dict(keep_vars=True)
    built = _build_empty(type(model), _describe(model), target)._weighted().state_dict(keep_vars=True)
    for name in ours | built:
        shapes = [list(each[name].shape) if name in each else None for each in (ours, built)]
        if shapes[0] != shapes[1]:
            raise WeightsError(
                f"{target} is not written: {name} is {shapes[0]}, and the settings of this {type(model).__name__} "
                f"build {shapes[1]}; a module that was changed after it was built cannot be saved"
            )
    picked: dict[str, Tensor] = {}
    for name, first in _first_names(built).items():
        if name == first:
            picked[name] = ours[name]
        elif ours[name] is not ours[first]:
            raise WeightsError(
                f"{target} is not written: {name} and {first} are one weight by the settings of this "
                f"{type(model).__name__}, and two here"
            )
    firsts = _first_names(ours)
    # A weight that the user has tied is written for each of its names.
    return {
        name: (tensor if firsts[name] == name else tensor.clone()).detach().cpu().contiguous()
        for name, tensor in picked.items()
    }


def load_model(cls: type[Made], description: Description, path: Path, *, device: Any = None) -> Made:
    """Build a model and load its weights from a safetensors file; it is in evaluation mode.

    What the file does not have, such as a buffer that is not persistent, is as the constructor makes it.

    Raises:
        WeightsError: the description builds no model, or the file is missing, damaged or of another model.
    """
    from safetensors import SafetensorError, safe_open

    place = torch.empty(0, device=device or "cpu").device  # torch's own error says best what is wrong with it
    try:
        with safe_open(path, framework="pt", device=str(place)) as file:
            names = set(file.keys())
            _check_counts(path, description, len(names))
            model = _build_empty(cls, description, path)
            built = model._weighted().state_dict(keep_vars=True)
            firsts = _first_names(built)
            expected = set(firsts.values())
            for wrong, what in ((expected - names, "is missing"), (names - expected, "is of another model")):
                if wrong:
                    raise WeightsError(f"{path}: the tensor {min(wrong)} {what}: {MEND}")
            # Before anything is read: the settings may ask for far more tensors than the file has.
            for name in sorted(names):
                shape, right = file.get_slice(name).get_shape(), list(built[name].shape)
                if shape != right:
                    raise WeightsError(f"{path}: {name} must be {right}, got {shape}: {MEND}")
            weights = {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path} cannot be read ({' '.join(str(error).split())}): {MEND}") from error
    for name, tensor in weights.items():
        if tensor.is_floating_point() != built[name].is_floating_point():
            raise WeightsError(f"{path}: {name} must be like {built[name].dtype}, got {tensor.dtype}: {MEND}")
        weights[name] = _take_place_of(built[name], tensor)
    if _has_more(model._weighted(), built):
        model = _build(cls, description, path, "cpu")
        model._weighted().to(place)
    # The same object for each name of a shared weight, so that it is shared again.
    model._weighted().load_state_dict({name: weights[first] for name, first in firsts.items()}, assign=True)
    model._weighted().eval()
    return model


def _load_whole(cls: type[Made], folder: Path, device: Any) -> tuple[dict[str, Any], Made]:
    """Return a configuration and its model: of one save, though another process may save there meanwhile."""
    while True:
        config = _read_config(cls, folder)
        path = find_marked(folder / WEIGHTS, config["weights"]["sha256"])
        try:
            with path.open("rb") as file:  # while it is open, no other file has its identity
                if hashlib.file_digest(file, "sha256").hexdigest() != config["weights"]["sha256"]:
                    raise WeightsError(f"{path} is damaged, or does not belong to the {CONFIG} beside it: {MEND}")
                model = load_model(cls, config, path, device=device)
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return config, model
        except (OSError, WeightsError) as error:
            if config != _read_config(cls, folder) or (path.name != WEIGHTS and not path.exists()):
                continue  # it was saved again, or has its name now
            if isinstance(error, OSError):
                raise WeightsError(f"cannot read {path}: {error.strerror}: {MEND}") from error
            raise


def _read_digest(folder: Path) -> str:
    """Return the digest of the weights of the model that is saved in a folder, empty if there is none."""
    try:
        return str(_read_config(Pretrained, folder)["weights"]["sha256"])
    except WeightsError:
        return ""


def _noting_arguments(constructor: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that notes its arguments, unless it is called by a subclass's."""
    signature = inspect.signature(constructor)

    @functools.wraps(constructor)
    def construct(self: Any, *positional: Any, **named: Any) -> None:
        positional, named = tuple(map(to_plain, positional)), {name: to_plain(value) for name, value in named.items()}
        outermost = type(self).__init__ is construct
        if outermost:
            bound = _bind(signature, self, positional, named)
        constructor(self, *positional, **named)
        if outermost:
            bound.apply_defaults()
            _, *arguments = bound.arguments.items()  # without self
            self._arguments = dict(arguments)
            # What differs is made of the argument, such as its inverse: building with it would make another model.
            self._kept = frozenset(name for name, value in arguments if _keeps(self, name, value))

    return construct


def _bind(
    signature: inspect.Signature, model: Pretrained, positional: tuple[Any, ...], named: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return a constructor's arguments by name, or refuse them in words about the class that the user has called."""
    try:
        return signature.bind(model, *positional, **named)
    except TypeError as error:
        kind = type(model).__name__
        _, *parameters = signature.parameters.values()  # without self
        names = [parameter.name for parameter in parameters]
        unknown = next((name for name in named if name not in names), None)
        by_place = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        by_name = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
        if len(positional) > len(by_place):
            rest = f"give the others by name: {', '.join(by_name)}" if by_name else "it has no others"
            places = ", ".join(by_place) or "no arguments"
            words = f"{kind} takes {places} by position, and got {len(positional)} arguments so: {rest}"
        elif unknown is not None:
            instead = model._absent.get(unknown) or did_you_mean(unknown, names) + f"it has {', '.join(names)}"
            words = f"{kind} has no argument {unknown!r}: {instead}"
        else:
            words = f"{kind}: {error}"
        raise TypeError(words) from None


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | list | tuple | dict) or _is_record(value)


def _keeps(model: Pretrained, name: str, argument: object) -> bool:
    """Return whether a model has an argument under its name: as it was given, or by a property of the class."""
    now = getattr(model, name, None)
    if now is argument:
        return True
    if not _is_plain(now):
        return False
    if isinstance(getattr(type(model), name, None), property):
        return True
    try:
        return bool(now == argument)
    except (RuntimeError, ValueError):  # tensors or arrays, in a list or alone, have no one answer
        return False


def _encode(model: Pretrained, name: str, value: Any) -> Any:
    """Return a setting as JSON has it."""
    if isinstance(value, Pretrained):
        return _describe(value)
    if type(value) in _OF_TORCH.values():
        more = {nn.LSTM: ("proj_size",), nn.RNN: ("nonlinearity",)}.get(type(value), ())
        settings = {argument: getattr(value, argument) for argument in (*_RECURRENT, *more)}
        return {"class": f"torch.nn.{type(value).__name__}", "settings": settings}
    if _is_record(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, dict):
        return {str(key): _encode(model, f"{name}[{key!r}]", each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(model, f"{name}[{place}]", each) for place, each in enumerate(value)]
    value = to_plain(value)
    if value is None or _is_plain(value):
        return value
    raise WeightsError(
        f"{name} of this {type(model).__name__} is a {type(value).__name__}, which cannot be written as JSON: it must "
        "be a number, words, a list or dict of them, a module that is Pretrained, or an LSTM, GRU or RNN of torch.nn"
    )


def _decode(value: Any) -> Any:
    """Return a setting from JSON, with the modules built that it describes."""
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    arguments = {name: _decode(each) for name, each in value.items()}
    if value.keys() != {"class", "settings"}:
        return arguments
    name, settings = arguments["class"], arguments["settings"]
    if isinstance(name, str) and (of_torch := _OF_TORCH.get(name)):
        return of_torch(**settings)
    kind = _find_class(Pretrained, name)
    if kind is None:
        raise ValueError(f"there is no class {name!r}")
    return _make(kind, settings)


def _find_hints(of: Any) -> dict[str, Any]:
    """Return the annotations of a function's arguments or a class's fields; none where a name in them is not found."""
    try:
        return typing.get_type_hints(of)
    except (AttributeError, NameError, TypeError):
        return {}


def _find_record(hint: Any) -> Any:
    """Return the dataclass of an annotation, also of one that allows None; None if there is none."""
    kinds = (hint, *typing.get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def _restore(value: Any, hint: Any) -> Any:
    """Return a decoded setting as its annotation has it: of a dict a dataclass, of a list in it a tuple."""
    kind = _find_record(hint)
    if not isinstance(value, dict) or kind is None:
        return value
    hints = _find_hints(kind)
    return kind(
        **{
            name: tuple(each) if typing.get_origin(hints.get(name)) is tuple else _restore(each, hints.get(name))
            for name, each in value.items()
        }
    )


def _make(kind: type[Made], settings: Mapping[str, Any]) -> Made:
    """Build a model of decoded settings."""
    hints = _find_hints(kind.__init__)
    return kind(**{name: _restore(value, hints.get(name)) for name, value in settings.items()})


def _find_class(base: type[Made], name: object) -> type[Made] | None:
    """Return the subclass of that name, the one with the fewest classes between: ours before a user's of ours."""
    several = [base]
    for each in several:
        if each.__name__ == name:
            return each
        several += each.__subclasses__()
    return None


def _build_empty(cls: type[Made], description: Description, path: Path) -> Made:
    """Build a model without memory for its weights, or with it where the constructor needs their values."""
    try:
        return _build(cls, description, path, "meta")
    except WeightsError:
        if _is_ours(_find_class(cls, description["class"])):
            raise
        return _build(cls, description, path, "cpu")


def _build(cls: type[Made], description: Description, path: Path, place: str) -> Made:
    """Build a model; the random numbers that it draws are not missed."""
    kind = _find_class(cls, description["class"])
    if kind is None:
        raise WeightsError(f"{path} holds a {description['class']}, not a {cls.__name__}")
    try:
        with torch.random.fork_rng(devices=[]), torch.device(place):
            return _make(kind, _decode(description["settings"]))
    except (AttributeError, LookupError, OverflowError, RuntimeError, TypeError, ValueError, FastWeightsError) as error:
        raise WeightsError(f"{path}: its settings build no {kind.__name__}: {one_line(error)}") from error


def _has_more(model: nn.Module, weights: Mapping[str, Tensor]) -> bool:
    """Return whether a model that was built without memory has tensors beside its weights."""
    known = {id(tensor) for tensor in weights.values()}
    values = (value for module in model.modules() for value in (*vars(module).values(), *module._buffers.values()))
    return any(isinstance(value, Tensor) and value.is_meta and id(value) not in known for value in values)


def _read_config(cls: type[Pretrained], folder: Path) -> dict[str, Any]:
    """Read `config.json`, and check that it is of that class."""
    path = folder / CONFIG
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise WeightsError(
            f"{folder} holds no model, it has no {CONFIG}: save_pretrained() a {cls.__name__} there first"
        ) from error
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is damaged: it is not JSON ({one_line(error)}): {MEND}") from error
    weights = config.get("weights") if is_description(config) else None
    # The digest becomes a part of a file's name.
    if not isinstance(weights, dict) or not str(weights.get("sha256", "")).isalnum():
        raise WeightsError(f"{path} was not written by save_pretrained: it must have a class, settings and weights")
    if not isinstance(config.get("about", {}), dict):
        raise WeightsError(f"{path} is damaged: about must be an object, got {config['about']!r}: {MEND}")
    return config


def _check_counts(path: Path, description: Any, tensors: int) -> None:
    """Refuse more layers than there are tensors: a model of ours is built layer by layer, and would take forever."""
    ours = description["class"] in _OF_TORCH or _is_ours(_find_class(Pretrained, description["class"]))
    for name, value in description["settings"].items():
        if is_description(value):
            _check_counts(path, value, tensors)
        elif name in _COUNTS and type(value) is int and value > tensors and ours:
            raise WeightsError(f"{path}: it has {tensors} tensors, and its settings ask for {name}={value}: {MEND}")


def _is_ours(kind: type | None) -> bool:
    return kind is not None and kind.__module__.startswith("fastweights.")


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the first name of each tensor by each of its names."""
    firsts: dict[int, str] = {}
    return {name: firsts.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _take_place_of(empty: Tensor, tensor: Tensor) -> Tensor:
    """Return a copy in the layout of an empty tensor, and a parameter where that is one."""
    # A copy: a mapped file would change under the reader, or end the process where it is cut short.
    copy = torch.empty_strided(empty.shape, empty.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return nn.Parameter(copy, empty.requires_grad) if isinstance(empty, nn.Parameter) else copy
