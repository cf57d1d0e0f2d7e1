"""Made-up data and tiny settings for all experiments, and readers of what a run writes."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from fastweights.reproduce.ba2016 import associative_retrieval as ba2016
from fastweights.reproduce.ba2016 import catch, facial_expression, mnist_glimpses
from fastweights.reproduce.guides import (
    adapt_language_model,
    around_an_encoder,
    digits,
    few_shot_classifier,
    learn_a_class,
    learn_by_name,
    learning_rate,
    rates,
    regression,
    when_an_lstm_is_better,
)
from fastweights.reproduce.munkhdalai2018 import ablation, mini_imagenet, penn_treebank, timing
from fastweights.reproduce.munkhdalai2018 import omniglot as few_shot_omniglot
from fastweights.reproduce.popgym import memory_tasks
from fastweights.reproduce.rae2018 import language as rae2018_language
from fastweights.reproduce.rae2018 import omniglot_curriculum, rare_classes
from fastweights.reproduce.recall import gauntlet, mqar, state_tracking
from fastweights.reproduce.recall import language as recall_language
from fastweights.reproduce.schlag2017 import associative_retrieval as schlag2017
from fastweights.reproduce.sprechmann2018 import incremental_classes, language, permuted_mnist
from fastweights.runs import RunFolder, folder
from fastweights.tasks import faces, missing_word, mnist, omniglot, text
from fastweights.tasks import mini_imagenet as mini_imagenet_data

FEW: dict[str, Any] = {
    "tasks": 8, "tasks_per_step": 2, "validate_every": 4, "validation_tasks": 3, "test_tasks": 5, "test_queries": 2,
    "queries": 1, "hidden_size": 6, "pool": 6,
}  # fmt: skip
GLIMPSES: dict[str, Any] = {"patch_size": 6, "readout_size": 7, "checkpoint_seconds": 0}
MAML: dict[str, Any] = {"maml_tasks": 4, "maml_tasks_per_step": 2, "maml_validate_every": 2}


class Tiny(NamedTuple):
    """An experiment that takes a second or two."""

    module: ModuleType
    settings: Any
    matters: dict[str, Any]  # a change that every member refuses to be resumed with


TINY = {
    tiny.module.EXPERIMENT: tiny
    for tiny in (
        Tiny(
            ba2016,
            ba2016.Settings(
                hidden_sizes=(8,), train_examples=300, validation_examples=50, test_examples=60, epochs=2,
                embedding_size=6, readout_size=7, checkpoint_seconds=0,
            ),
            {"learning_rate": 0.5},
        ),
        Tiny(
            catch,
            catch.Settings(
                size=4, visible=2, frames=96, scores=2, episodes=6, games=4, steps=3, hidden_size=5,
                checkpoint_seconds=0,
            ),
            {"entropy": 0.5},
        ),
        Tiny(
            mnist_glimpses,
            mnist_glimpses.Settings(hidden_sizes=(8,), epochs=2, batch_size=32, **GLIMPSES),
            {"learning_rate": 0.5},
        ),
        Tiny(
            facial_expression,
            facial_expression.Settings(hidden_sizes=(8,), epochs=2, batch_size=32, **GLIMPSES),
            {"learning_rate": 0.5},
        ),
        Tiny(
            schlag2017,
            schlag2017.Settings(
                train_queries=120, validation_queries=40, test_queries=40, epochs=2, attention_epochs=1, lstm_epochs=1,
                hyper_lstm_epochs=1, batch_size=20, hidden_size=6, slow_inner_size=7, attention_hidden_size=8,
                lstm_hidden_size=8, hyper_lstm_hidden_size=8, hyper_lstm_small_size=5, hyper_lstm_embedding_size=2,
                checkpoint_seconds=0,
            ),
            {"segment": 16},
        ),
        Tiny(
            omniglot_curriculum,
            omniglot_curriculum.Settings(
                seeds=(1,), first_classes=4, added_classes=2, last_classes=12, threshold=0.3, test_every=2,
                most_steps=60, batch_size=8,
            ),
            {"batch_size": 4},
        ),
        Tiny(
            rare_classes,
            rare_classes.Settings(classes=18, epochs=2, batch_size=32, checkpoint_seconds=0),
            {"dropout": 0.1},
        ),
        Tiny(
            permuted_mnist,
            permuted_mnist.Settings(
                tasks=2, examples=60, hidden_size=8, epochs=2, batch_size=20, memories=(5, 20), neighbours=4, steps=2,
                random_neighbours=6, random_steps=1, queries=10, tested=(1,),
            ),
            {"hidden_size": 9},
        ),
        Tiny(
            incremental_classes,
            incremental_classes.Settings(
                seeds=(1,), images_per_class=9, test_images=3, validation_images=2, width=2, encoder_epochs=1,
                crop_size=16, epochs=0.3, batch_size=4, neighbours=(3,), capacities=(30,), steps=2,
            ),
            {"scarce": 0.5},
        ),
        Tiny(
            rae2018_language,
            rae2018_language.Settings(
                epochs=2, batch_size=4, segment=9, sampled=8, embedding_size=5, hidden_size=6, memory_size=50,
                neighbours=(4, 8), thetas=(0.1, 1.0), local_rates=(0.5,), searched=60, checkpoint_seconds=0,
            ),
            {"segment": 8},
        ),
        Tiny(
            language,
            language.Settings(
                epochs=2, batch_size=4, segment=9, sampled=8, embedding_size=5, hidden_size=6, memory_size=50,
                neighbours=(8,), thetas=(0.1, 1.0), local_rates=(0.5, 2.0), rivals=("dynamic", "knn"),
                dynamic_segment=20, dynamic_rates=(1e-4,), dynamic_decays=(2e-3,), knn_words=200,
                knn_temperatures=(1.0,), searched=60,
                checkpoint_seconds=0,
            ),
            {"segment": 8},
        ),
        Tiny(
            adapt_language_model,
            adapt_language_model.Settings(
                models=("alone", "all", "last-layer", "all-weights"), contexts=(8, 16), validation_tokens=60,
                test_tokens=60, segment=16,
            ),
            {"test_tokens": 50},
        ),
        Tiny(
            learning_rate,
            learning_rate.Settings(
                models=("alone", "paper"), hidden_sizes=(4,), curve_epochs=1, given_points=5, train_images=60,
                digit_epochs=1, given_images=2, test_images=20,
            ),
            {"given_points": 6},
        ),
        Tiny(rates, rates.Settings(models=("learnt", "gru"), tasks=("signs",), effort=0.01), {"effort": 0.02}),
        Tiny(
            few_shot_classifier,
            few_shot_classifier.Settings(kinds=("5-way-1-to-5-shot", "times"), tasks=2, rounds=1),
            {"queries": 2},
        ),
        Tiny(
            learn_a_class,
            learn_a_class.Settings(seeds=(1,), epochs=1, rounds=1),
            {"epochs": 2},
        ),
        Tiny(
            around_an_encoder,
            around_an_encoder.Settings(models=("head", "adaptive-classifier"), sets=("mnist-64",), seeds=(1,)),
            {"draws": 1},
        ),
        Tiny(
            learn_by_name,
            learn_by_name.Settings(
                models=("adaptive-all", "means", "mbpa-12"), sets=("mnist",), seeds=(1,), draws=2, slow_draws=1,
                slow_queries=5, rounds=1,
            ),
            {"draws": 1},
        ),
        Tiny(digits, digits.Settings(models=("adaptive-classifier",), seeds=(1, 2), shots=(1, 3)), {"shots": (2,)}),
        Tiny(
            regression,
            regression.Settings(models=("alone", "further"), seeds=(1,), given=5, epochs=1),
            {"given": 6},
        ),
        Tiny(
            when_an_lstm_is_better,
            when_an_lstm_is_better.Settings(
                models=("lstm", "small-gain"), hidden_sizes=(5,), scored=(1, 2), batch_size=3, test_examples=20
            ),
            {"batch_size": 4},
        ),
        Tiny(
            few_shot_omniglot,
            few_shot_omniglot.Settings(
                models=("hebbian", "maml"), ways=(2, 3), training_ways=4, shots=(1, 2), filters=4, **FEW, **MAML
            ),
            {"queries": 2},
        ),
        Tiny(
            mini_imagenet,
            mini_imagenet.Settings(
                models=("hebbian",), ways=(2,), training_ways=3, shots=(1,), filters=2, **FEW, **MAML
            ),
            {"queries": 2},
        ),
        Tiny(
            penn_treebank,
            penn_treebank.Settings(
                models=("matching",), shots=(1, 2), embedding_size=3, **(FEW | {"test_queries": 1}), **MAML
            ),
            {"averaging": 0.5},
        ),
        Tiny(
            ablation,
            ablation.Settings(models=("truncated",), ways=(2,), training_ways=3, filters=2, **FEW),
            {"queries": 2},
        ),
        Tiny(
            mqar,
            mqar.Settings(
                embedding_sizes=(8,), train_examples=60, validation_examples=20, test_examples=20, epochs=2,
                batch_size=20, steps=16, pairs=2, vocabulary_size=20, checkpoint_seconds=0,
            ),
            {"dropout": 0.2},
        ),
        Tiny(
            state_tracking,
            state_tracking.Settings(
                embedding_sizes=(8,), train_examples=60, validation_examples=20, test_examples=20, epochs=2,
                batch_size=20, steps=5, checkpoint_seconds=0,
            ),
            {"mlp_multiple": 1},
        ),
        Tiny(
            gauntlet,
            gauntlet.Settings(
                cells=("mqar-4", "adding"), parameters=6000, effort=0.1, train_examples=60, validation_examples=20,
                test_examples=20, batch_size=20, checkpoint_seconds=0,
            ),
            {"weight_decay": 0.2},
        ),
        Tiny(
            recall_language,
            recall_language.Settings(
                parameters=2500, steps=16, batch_size=8, epochs=2, sampled=8, delta_heads=1, learning_rates=(1e-2,),
                checkpoint_seconds=0,
            ),
            {"sampled": 4},
        ),
        Tiny(
            memory_tasks,
            memory_tasks.Settings(
                environments=("RepeatPreviousEasy",), frames=240, scores=2, episodes=4, parallel=2, steps=4,
                parameters=1500, encoder_size=4, slow_inner_size=5, checkpoint_seconds=0,
            ),
            {"discount": 0.9},
        ),
        Tiny(
            timing,
            timing.Settings(models=("hebbian", "matching"), filters=2, rounds=1, hidden_size=4, queries=2),
            {"queries": 3},
        ),
    )
}  # fmt: skip
TRAINED = [name for name in TINY if name != timing.EXPERIMENT]


def drawings(classes, per_class, *shape):
    """A pattern for each class, and noise."""
    generator = torch.Generator().manual_seed(0)
    patterns = torch.rand(classes, 1, *shape, generator=generator) < 0.3
    noise = torch.rand(classes, per_class, *shape, generator=generator) < 0.1
    return 255 * (patterns ^ noise).to(torch.uint8)


def characters(size=28):
    """18 classes, four of them of two unseen alphabets, in the finer drawings each pixel several times."""
    images = drawings(18, 20, 28, 28).repeat_interleave(size // 28, 2).repeat_interleave(size // 28, 3)
    alphabet = torch.tensor([0] * 14 + [1, 1, 2, 2])
    return omniglot.Omniglot(images, ["a", "b", "c"], alphabet, [f"character{index}" for index in range(18)], 14)


def made_up_digits(count, seed):
    """Digits of dots: a pattern for each, and noise."""
    patterns = torch.rand(10, 28, 28, generator=torch.Generator().manual_seed(0)) < 0.2
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    noise = torch.rand(count, 28, 28, generator=generator) < 0.1
    return 255 * (patterns[labels] ^ noise).to(torch.uint8), labels


def expressions():
    """Faces of dots, twenty of each of three expressions: twelve to learn from."""
    images = drawings(3, 20, 48, 48)
    labels, parts = torch.arange(3).unsqueeze(1).expand(3, 20), torch.tensor([0] * 12 + [1] * 4 + [2] * 4).expand(3, 20)
    return faces.Faces(images.flatten(0, 1), labels.flatten(), parts.flatten(), ["glad", "sad", "mad"])


def sentences_of_words():
    """Sentences of a word between two that tell it, of six words for each split."""

    def split(first):
        rows = [(3 + word, 21 + word, 3 + word) for word in range(first, first + 6) for _ in range(6)]
        count = len(rows)
        words = torch.tensor(rows).flatten()
        sentences = missing_word.Sentences(
            words, 3 * torch.arange(count), torch.full((count,), 3), words[1::3].clone(), vocabulary_size=21
        )
        labels = torch.arange(6).repeat_interleave(6)
        return missing_word.Split(sentences, labels, torch.arange(count), ["w"] * 6)

    return missing_word.MissingWord(split(0), split(6), split(12), ["v"] * 21)


def made_up_text(name, data_dir=None, words=20):
    """A text that comes back to a few of its words for a while, then to others."""
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        topics = torch.randint(0, words, (count // 40 + 1, 5), generator=generator).repeat_interleave(40, 0)[:count]
        chosen = torch.randint(0, 5, (count, 1), generator=generator)
        return topics.gather(1, chosen)[:, 0].int()

    train, validation, test = draw(600), draw(160), draw(170)
    vocabulary = text.Vocabulary([f"w{word}" for word in range(words)], torch.bincount(train, minlength=words))
    return text.Corpus(name, vocabulary, train, validation, test)


def pixels(count, seed):
    """Three digits of eight pixels, and which they are."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(count) % 3
    return (patterns[y] + 0.2 * torch.randn(count, 8, generator=generator)).numpy(), y.numpy()


def patients():
    """Measurements of sixty patients, and what they add up to."""
    x = torch.randn(60, 10, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


class Letters:
    """A tokenizer of letters."""

    bos_token_id = None

    def __call__(self, text, verbose=True):
        return {"input_ids": [3 + ord(letter) - ord("a") for letter in text]}

    def get_vocab(self):
        return {chr(ord("a") + letter): 3 + letter for letter in range(26)}


def made_up_model():
    """A tiny language model with random weights, and its tokenizer."""
    from tests.memory.language_models import make_model

    return make_model(), Letters()


def letters(data_dir=None):
    """Two texts of letters."""
    numbers = torch.randint(26, (2, 1000), generator=torch.Generator().manual_seed(0)).tolist()
    return tuple("".join(chr(ord("a") + number) for number in text) for text in numbers)


def make_up(monkeypatch):
    """Put small made-up data in the place of every data set; return the folders that Omniglot was asked for in."""
    asked = []

    def load_omniglot(data_dir=None, size=28):
        asked.append(data_dir)
        return characters(size)

    monkeypatch.setattr(omniglot, "load", load_omniglot)
    split = omniglot.FewShotSplit(*torch.arange(18).split(6))
    monkeypatch.setattr(omniglot, "few_shot_split", lambda data, by="class": split)
    photographs = mini_imagenet_data.MiniImageNet(
        drawings(18, 9, 3, 84, 84), [f"n{number}" for number in range(18)], torch.arange(3).repeat_interleave(6)
    )
    monkeypatch.setattr(mini_imagenet_data, "load", lambda data_dir=None: photographs)
    monkeypatch.setattr(missing_word, "load", lambda data_dir=None, sentences=4: sentences_of_words())
    monkeypatch.setattr(text, "load", made_up_text)
    monkeypatch.setattr(regression, "load_patients", patients)
    monkeypatch.setattr(digits, "load", lambda: (pixels(120, 1), pixels(30, 2)))
    monkeypatch.setattr(digits, "DIGITS", 2)
    monkeypatch.setattr(adapt_language_model, "load_model", made_up_model)
    monkeypatch.setitem(adapt_language_model.READERS, "wikitext", letters)
    monkeypatch.setitem(adapt_language_model.READERS, "cost", letters)
    monkeypatch.setattr(
        mnist, "load", lambda data_dir=None: mnist.MNIST(*made_up_digits(200, 1), *made_up_digits(40, 2))
    )
    monkeypatch.setattr(permuted_mnist, "VALIDATION", 50)
    monkeypatch.setattr(mnist_glimpses, "VALIDATION", 50)
    monkeypatch.setattr(around_an_encoder, "HELD_OUT", 100)
    monkeypatch.setattr(faces, "load_fer2013", lambda data_dir=None: expressions())
    return asked


def result(folder):
    return json.loads((folder / "result.json").read_text())


def settings_in(folder):
    return json.loads((folder / "settings.json").read_text())


def records(folder, *, keep_seconds=False):
    """What a member measured; times, which decide nothing, are left out."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    def is_time(key):
        return key == "seconds" or "milliseconds" in key

    return [{key: value for key, value in line.items() if keep_seconds or not is_time(key)} for line in lines]


def members_of(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("metrics.jsonl"))


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class KilledError(Exception):
    pass


def kill_before(step, call, patch):
    """Let the process die before the record, or the checkpoint after the first, of this number is written."""
    owner, name = {"record": (RunFolder, "append"), "checkpoint": (folder, "save_checkpoint")}[step]
    write, left = getattr(owner, name), call

    def dying(*arguments):
        nonlocal left
        left -= 1
        if left == 0:
            raise KilledError
        return write(*arguments)

    patch.setattr(owner, name, dying)
