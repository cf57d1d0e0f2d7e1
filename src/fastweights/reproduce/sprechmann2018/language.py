"""Language, table 2 and figure 8 of Sprechmann et al. 2018: an LSTM that remembers the text it reads.

Section 4.3 and appendices B and C of "Memory-based parameter adaptation".
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fastweights.checks import check_not_negative, check_positive
from fastweights.errors import RunError
from fastweights.nn import LSTMLanguageModel
from fastweights.pretrained import find_published
from fastweights.report.blocks import Paragraph, Table
from fastweights.report.content import by_frequency as frequency_blocks
from fastweights.report.content import fitted as fitted_blocks
from fastweights.reproduce._experiment import check_settings, one_line_errors, only, run_of, settings_of
from fastweights.reproduce._language import (
    OF_SCORES,
    ROWS,
    Keys,
    MemorySettings,
    RivalSettings,
    build_trained,
    check_language,
    make_model,
    prepare_corpora,
    score_model,
    train_and_score,
)
from fastweights.reproduce._members import Members, set_threads
from fastweights.runs import (
    Bars,
    Curve,
    Member,
    Progress,
    Record,
    RunFolder,
    load_checkpoint,
    read_members,
    show_progress,
)
from fastweights.tasks import text

EXPERIMENT = "sprechmann2018/language"
QUICK_MINUTES = 11  # 10 of training on one core
DATA = "ptb"
METRICS = ("validation_loss", "validation_perplexity")  # scores that a search can choose by

__all__ = ["PRESETS", "Settings", "build_trained", "check", "evaluate", "load_trained", "run"]

BUCKETS = 5  # figure 8

ModelName = Literal["ptb", "wikitext-2"]

TITLES: dict[ModelName, str] = {"ptb": "Penn Treebank", "wikitext-2": "WikiText-2"}
# Table 2: perplexity on validation and on test.
PAPER: dict[tuple[ModelName, str], tuple[float, float]] = {
    ("ptb", ""): (61.8, 59.6),
    ("ptb", "cache_"): (55.7, 55.3),
    ("ptb", "mbpa_"): (54.8, 54.3),
    ("ptb", "cache_mbpa_"): (54.8, 54.4),
    ("wikitext-2", ""): (69.3, 65.9),
    ("wikitext-2", "cache_"): (53.2, 51.3),
    ("wikitext-2", "mbpa_"): (58.4, 56.0),
    ("wikitext-2", "cache_mbpa_"): (51.8, 49.4),
}


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of the language models and of their training."""

    models: tuple[ModelName, ...] = ("ptb",)
    """Language models to train and test, each named by its text."""
    seeds: tuple[int, ...] = (1,)
    """Seeds of the weights and of dropout: one training run for each."""

    epochs: int = only("ptb", 4, "Passes over the training text.", recorded_as="epochs")
    wikitext_epochs: int = only("wikitext-2", 3, "Passes over the training text.", recorded_as="epochs")
    batch_size: int = 20
    """Pieces of the text that are read side by side."""
    segment: int = 35
    """Words over which the gradient is propagated back."""
    sampled: int = only(
        "ptb",
        1024,
        "Words in the softmax of each pass except the last, drawn again for each segment; 0 takes all words.",
        recorded_as="sampled",
    )
    wikitext_sampled: int = only("wikitext-2", 2048, "Words in the softmax, as for --sampled.", recorded_as="sampled")
    learning_rate: float = 4e-3
    """Learning rate of Adam; it falls along a cosine to zero."""
    clip_norm: float = 1.0
    """Largest norm of the gradient: a larger one is scaled down to it."""
    bfloat16: bool = False
    """Products in bfloat16: several times faster where the processor has instructions for it."""

    embedding_size: int = only(
        "ptb", 128, "Features of a word, and of the input of the softmax.", recorded_as="embedding_size"
    )
    wikitext_embedding_size: int = only(
        "wikitext-2", 128, "Features of a word, and of the input of the softmax.", recorded_as="embedding_size"
    )
    hidden_size: int = only("ptb", 192, "Units of the LSTM.", recorded_as="hidden_size")
    wikitext_hidden_size: int = only("wikitext-2", 192, "Units of the LSTM.", recorded_as="hidden_size")
    embedding_dropout: float = 0.0
    """Fraction of the vocabulary dropped from each segment."""
    input_dropout: float = 0.1
    """Dropout on the inputs of the LSTM."""
    state_dropout: float = 0.0
    """Dropout on the state that a step reads."""
    output_dropout: float = 0.2
    """Dropout on the input of the softmax."""


@dataclass(frozen=True)
class Settings(RivalSettings, MemorySettings, TrainingSettings):
    """Language models of Sprechmann et al. 2018: recent words remembered by a cache, by MbPA and by two rivals."""

    cache_keys: Keys = "state"
    """Keys of the cache: the input of the softmax, or the state of the LSTM."""
    thetas: tuple[float, ...] = (0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
    """Factors of the likeness in the cache; the beginning of validation chooses one. Empty: no cache."""
    evaluate_only: bool = False
    """Test without training: the weights in the run's folder, or the published weights if it has none."""
    weights: str | None = None
    """Folder of a trained model, or its name on a hub, that --evaluate-only tests in place of those."""
    data_dir: Path | None = None
    """Folder that has the folders of the texts; by default $FASTWEIGHTS_DATA, then the user's cache."""
    threads: int = 1
    """Threads to compute with."""
    device: str = "cpu"
    """Device to train on: cpu, cuda, ..."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints."""


_REGULARISED: dict[str, Any] = {
    "learning_rate": 2e-3, "embedding_dropout": 0.1, "input_dropout": 0.3, "state_dropout": 0.2, "output_dropout": 0.5,
}  # fmt: skip
PRESETS = {
    "quick": Settings(),
    # Two hours of training on one core that has instructions for bfloat16.
    "small": Settings(
        models=("ptb", "wikitext-2"),
        epochs=25,
        wikitext_epochs=12,
        bfloat16=True,
        sampled=2048,
        embedding_size=256,
        wikitext_embedding_size=160,
        hidden_size=512,
        wikitext_hidden_size=512,
        rivals=("dynamic", "knn"),
        **_REGULARISED,
    ),
    # The paper's numbers of parameters, 10 and 24 million.
    "paper": Settings(
        models=("ptb", "wikitext-2"),
        epochs=40,
        wikitext_epochs=40,
        sampled=0,
        wikitext_sampled=0,
        embedding_size=268,
        wikitext_embedding_size=241,
        hidden_size=1194,
        wikitext_hidden_size=1853,
        rivals=("dynamic", "knn"),
        knn_words=1_000_000,
        **_REGULARISED,
    ),
}


class TrainedModel(NamedTuple):
    """A language model with its weights, and their origin in words."""

    name: ModelName
    origin: str
    model: LSTMLanguageModel


run = run_of(__name__)


def prepare(settings: Settings, folder: Path) -> Members:
    """Train a language model on every text with every seed, score it with its memories.

    Raises:
        DataError: a text is not there.
    """
    corpora = prepare_corpora(lambda: load_corpora(settings), settings.batch_size)

    def train_member(name: ModelName, seed: int, member: RunFolder, progress: Progress) -> None:
        title = f"{TITLES[name]}, seed {seed}"
        train_and_score(settings, name, corpora[name], member, progress, seed=seed, title=title, buckets=BUCKETS)

    members = member_folders(settings, corpora, folder)
    return Members(members, train_member, lambda: table(settings, read_members(folder)))


def check(settings: Settings) -> None:
    """Refuse settings that cannot run, before anything is trained or written.

    Raises:
        RunError: a setting is out of range, or nothing is to be trained.
    """
    if settings.evaluate_only:
        raise RunError("evaluate_only trains nothing: leave it out here, or call evaluate")
    if settings.weights is not None:
        raise RunError("--weights names a model that is trained already: give --evaluate-only too, or leave it out")
    _check_numbers(settings)


@one_line_errors()
def _check_numbers(settings: Settings) -> None:
    rival_grids = ("dynamic_rates", "dynamic_decays", "knn_temperatures")
    sizes = ("dynamic_segment", "knn_words", "knn_neighbours")
    check_settings(settings, sizes=sizes, lists=("models", "seeds", *rival_grids))
    for name in rival_grids:
        for value in getattr(settings, name):
            (check_not_negative if name == "dynamic_decays" else check_positive)(**{name: value})
    check_language(settings)


def load_corpora(settings: Settings) -> dict[ModelName, text.Corpus]:
    """Load the texts of the models that are asked for.

    Raises:
        DataError: a text is not there.
    """
    return {name: text.load(name, settings.data_dir) for name in settings.models}


def member_folders(
    settings: Settings, corpora: Mapping[ModelName, text.Corpus], folder: str | os.PathLike[str]
) -> dict[tuple[ModelName, int], RunFolder]:
    """Return the folder of each model and seed."""
    members = {}
    for model in settings.models:
        own = settings_of(settings, model, without=("evaluate_only", "weights"))
        digest = corpora[model].vocabulary.digest  # a text of other words is refused
        for seed in settings.seeds:
            numbers = {"model": title_of(model), "hidden_size": own["hidden_size"], "seed": seed} | own
            path = Path(folder, f"{model}-{own['hidden_size']}-seed{seed}")
            members[model, seed] = RunFolder(path, numbers | {"vocabulary": digest}, may_change=OF_SCORES)
    return members


def title_of(model: ModelName, row: str = "") -> str:
    """Return the name of a row of the table."""
    return f"{TITLES[model]}, {ROWS[row][0]}"


def evaluate(settings: Settings, folder: str | os.PathLike[str]) -> list[Paragraph | Table]:
    """Score the weights in the run's folder with their memories, or the published ones where it has none.

    Returns:
        For each model the origin of its weights, its perplexities beside the paper's, what MbPA gains by how often
        words occur in training, and what was fitted on validation.

    Raises:
        RunError: settings out of range, a damaged file, a text with other words, or no weights anywhere.
        DataError: a text is not there.
    """
    _check_numbers(settings)
    corpora = load_corpora(settings)
    blocks: list[Paragraph | Table] = []
    with set_threads(settings.threads), show_progress() as progress:
        for name, origin, model in load_trained(settings, corpora, folder):
            record = score_model(model.to(settings.device), corpora[name], settings, progress, buckets=BUCKETS)
            about = {"model": title_of(name), "hidden_size": model.hidden_size}
            member = Member(name, about, {}, [], record)
            lines = [
                (row["model"], row["metric"], *(f"{number:.2f}" if number else "-" for number in numbers))
                for row in rows([member])
                for numbers in [(row["paper"], *row["ours"], row["floor"])]
            ]
            columns = ("paper", "ours", "floor")
            blocks += [
                Paragraph(f"{TITLES[name]}, LSTM of {model.hidden_size} units: {origin}"),
                Table("Perplexity", ("model", "metric", *columns), lines, right=columns),
                *frequency_blocks([member]),
                *fitted_blocks([member]),
            ]
    for name in settings.models:
        if not any(block.text.startswith(TITLES[name]) for block in blocks if isinstance(block, Paragraph)):
            blocks.append(Paragraph(f"{TITLES[name]}: {_no_weights(folder)}"))
    return blocks


def load_trained(
    settings: Settings, corpora: Mapping[ModelName, text.Corpus], folder: str | os.PathLike[str]
) -> list[TrainedModel]:
    """Load the models that have been trained: each of the settings in the run's folder, else the published ones.

    The published ones, and those of `--weights`, have the sizes that they were trained with, whatever the settings say.

    Raises:
        RunError: a damaged file, a text with other words, or no weights anywhere.
        WeightsError: a damaged folder, or one of another model.
        HubError: `--weights` is neither a folder nor on the hub.
    """
    if settings.weights is not None:
        if len(settings.models) > 1:
            raise RunError(f"--weights {settings.weights} is one model's: give --models the one text that it knows")
        return [_load_shared(settings.weights, settings.models[0], corpora)]
    models = []
    for (name, _), member in member_folders(settings, corpora, folder).items():
        state = load_checkpoint(member.path / "checkpoint.pt")
        if state is not None and state.get("best"):
            member.check()
            model = make_model(len(corpora[name].vocabulary), member.settings)
            try:
                model.load_state_dict(state["best"])
            except RuntimeError as error:
                raise RunError(f"the weights in {member.path} have other sizes than these settings give") from error
            models.append(TrainedModel(name, f"the best pass of {member.path}", model))
    for name in settings.models:
        published = f"sprechmann2018-{name}"
        if find_published(published) and all(name != model.name for model in models):
            models.append(_load_shared(published, name, corpora))
    if not models:
        raise RunError(f"{' and '.join(TITLES[name] for name in settings.models)}: {_no_weights(folder)}")
    return models


def _load_shared(folder: str, name: ModelName, corpora: Mapping[ModelName, text.Corpus]) -> TrainedModel:
    """Load a model that `save_pretrained` wrote, to be computed in float32."""
    model = LSTMLanguageModel.from_pretrained(folder).float()
    facts = ", ".join(f"{fact} {model.about[fact]}" for fact in ("seed", "steps", "commit") if fact in model.about)
    origin = f"the weights of {folder}" + f" ({facts})" * bool(facts)
    words = corpora[name].vocabulary
    if model.about.get("vocabulary", words.digest) != words.digest or model.vocabulary_size != len(words):
        raise RunError(
            f"{TITLES[name]}: {origin} know other words ({model.vocabulary_size:,}) than this text "
            f"({len(words):,}): give the text that they were trained on"
        )
    return TrainedModel(name, origin, model)


def _no_weights(folder: str | os.PathLike[str]) -> str:
    return (
        f"no weights in {folder}: train first, work in a checkout of the repository, which has some in models/, "
        "or give --weights FOLDER_OR_HUB_NAME"
    )


def table(settings: Settings, members: list[Member]) -> dict[str, Any]:
    """Return the table's rows and curve."""
    requested = [(title_of(name), settings_of(settings, name)["hidden_size"]) for name in settings.models]
    return {
        "requested": requested,
        "rows": rows(members, requested),
        "curves": [Curve("validation_perplexity", "validation perplexity")],
        "bars": [panel for member in members if (panel := gains_of_mbpa(member))],
    }


def gains_of_mbpa(member: Member) -> Bars | None:
    """Return figure 8 of a member: what MbPA gains over the cache alone, by how often words occur in training."""
    lines = (member.result or {}).get("test_by_frequency", {})
    if "LSTM + cache + MbPA" not in lines:
        return None
    pairs = zip(lines["LSTM + cache + MbPA"], lines["LSTM + cache"], strict=True)
    gains = [100 * (1 - both / cache) if both and cache else None for both, cache in pairs]
    return Bars(
        f"{member.model}: gain of MbPA over LSTM + cache",
        "less perplexity, %",
        "occurrences in training",
        lines["occurrences in training"],
        {"MbPA": gains},
    )


def rows(members: Sequence[Member], requested: Sequence[tuple[str, int]] = ()) -> list[Record]:
    """Return the table's rows: each way to remember, on validation and on test, beside the paper's and the floor."""
    names = {title_of(name): name for name in TITLES}
    trained = [(member.model, member.hidden_size) for member in members]
    found = []
    for title, size in dict.fromkeys([*requested, *trained]):
        mine = [member for member in members if (member.model, member.hidden_size) == (title, size)]
        results = [member.result or {} for member in sorted(mine, key=lambda member: member.seed or 0)]
        for place, split in enumerate(("validation", "test")):
            floor = next((result[f"{split}_floor"] for result in results if f"{split}_floor" in result), None)
            for row in ROWS:
                key, paper = f"{split}_{row}perplexity", PAPER.get((names[title], row))
                ours = [result[key] for result in results if key in result and floor is not None]
                if ours or paper:
                    found.append(
                        {
                            "model": title_of(names[title], row),
                            "hidden_size": size,
                            "metric": f"{split} perplexity",
                            "ours": ours,
                            "paper": paper[place] if paper else None,
                            "floor": floor,
                        }
                    )
    return found
