"""The papers' numbers and settings, copied from their texts once more: a slip of the pen in a table is found here."""

import pytest

from fastweights.reproduce.ba2016 import associative_retrieval as ba2016
from fastweights.reproduce.ba2016 import facial_expression, mnist_glimpses
from fastweights.reproduce.munkhdalai2018 import ablation, mini_imagenet, omniglot, penn_treebank
from fastweights.reproduce.rae2018 import language as rae2018_language
from fastweights.reproduce.rae2018 import omniglot_curriculum, rare_classes
from fastweights.reproduce.schlag2017 import associative_retrieval as schlag2017
from fastweights.reproduce.sprechmann2018 import incremental_classes, language, permuted_mnist


def rows(text):
    """The lines of a table: a name, and the numbers that follow it."""
    lines = [line.split("|") for line in text.strip().splitlines()]
    return {name.strip(): tuple(map(float, numbers.split())) for name, numbers in lines}


def test_ba2016_under_section_4_1():
    table = rows("""
        IRNN | 62.11 60.23 0.34
        LSTM | 60.81 1.85 0
        Associative LSTM | 60.13 1.62 0
        Fast weights | 1.81 0 0
    """)
    assert {(name, size): n for name, ns in table.items() for size, n in zip((20, 50, 100), ns, strict=True)} == (
        ba2016.PAPER
    )
    paper = ba2016.PRESETS["paper"]
    assert (paper.hidden_sizes, paper.models) == ((20, 50, 100), tuple(ba2016.TITLES))
    assert (paper.train_examples, paper.validation_examples, paper.test_examples) == (100_000, 10_000, 20_000)
    assert (paper.decay, paper.rate, paper.inner_steps, paper.batch_size, paper.pairs) == (0.9, 0.5, 1, 128, 4)
    assert (paper.associative_lstm_copies, paper.associative_lstm_heads) == (4, 3)


def test_ba2016_tables_1_and_2():
    table = rows("""
        IRNN | 12.95 1.95 1.42
        LSTM | 12 1.55 1.10
        ConvNet | 1.81 1.00 0.9
        Fast weights | 7.21 1.30 0.85
    """)
    assert {(name, size): n for name, ns in table.items() for size, n in zip((50, 100, 200), ns, strict=True)} == (
        mnist_glimpses.PAPER
    )
    accuracies = rows("""
        IRNN | 81.11
        LSTM | 81.32
        ConvNet | 88.23
        Fast weights | 86.34
    """)
    assert {(name, 200): pytest.approx(100 - ns[0]) for name, ns in accuracies.items()} == facial_expression.PAPER
    for experiment, sizes in ((mnist_glimpses, (50, 100, 200)), (facial_expression, (200,))):
        paper = experiment.PRESETS["paper"]
        models = [experiment.TITLES[model] for model in paper.models]
        assert (paper.hidden_sizes, models[:4]) == (sizes, ["IRNN", "LSTM", "ConvNet", "Fast weights"])
        assert (paper.decay, paper.inner_steps, paper.stores, paper.clear) == (0.9, 1, "marked", True)


def test_schlag2017_table_1():
    table = rows("""
        AttentionFW | 0.9922 0.5323 0.0274 0.0063
        LSTM | 0.9936 0.6252 0.0267 0.0061
        HyperLSTM | 0.9963 0.7804 0.0137 0.0031
        Gated fast weights | 0.9979 0.9522 0.0149 0.0016
    """)
    columns = ("test total accuracy", "test partial accuracy", "test total bits", "test partial bits")
    sizes = {"AttentionFW": 300, "LSTM": 600, "HyperLSTM": 874, "Gated fast weights": 40}
    for score in schlag2017.scores():
        column = columns.index(score.metric)
        assert score.paper == {(name, sizes[name]): numbers[column] for name, numbers in table.items()}
    paper = schlag2017.PRESETS["paper"]
    assert paper.models == tuple(schlag2017.TITLES)
    assert (paper.train_queries, paper.validation_queries, paper.test_queries) == (100_000, 5_000, 5_000)
    assert (paper.batch_size, paper.segment, paper.embedding_size) == (256, 32, 15)


def test_rae2018_section_4_1():
    for settings in omniglot_curriculum.PRESETS.values():
        schedule = omniglot_curriculum.schedule(settings, settings.learning_rates[0])
        assert (schedule.first_classes, schedule.added_classes, schedule.threshold) == (30, 5, 0.6)
        assert (schedule.learning_rate, settings.dropout, settings.degrees) == (8e-3, 0.2, 30)
    assert omniglot_curriculum.PRESETS["paper"].seeds == tuple(range(1, 11))  # figure 3: ten seeds
    assert (omniglot_curriculum.FROM, omniglot_curriculum.FEATURES, rare_classes.TEST) == (80, 64, 5)


def test_rae2018_tables_1_and_2():
    table = rows("""
        LSTM (ours) | 36.0 36.4
        LSTM + Cache | 34.5 34.8
        LSTM + Hebbian | 34.1 34.3
        LSTM + Hebbian + Cache | 29.7 29.9
        LSTM + Hebbian + Cache + MbPA | 29.0 29.2
    """)
    keys = [("softmax", ""), ("softmax", "cache_"), ("hebbian", ""), ("hebbian", "cache_"), ("hebbian", "cache_mbpa_")]
    assert dict(zip(keys, table.values(), strict=True)) == rae2018_language.PAPER
    table = rows("""
        wikitext-103 softmax | 12.1 2.2e2 1.2e3 9.7e3 36.4
        wikitext-103 hebbian | 12.1 1.8e2 7.6e2 5.2e3 34.3
        gutenberg softmax | 19.0 9.8e2 6.9e3 8.6e4 47.9
        gutenberg hebbian | 18.1 9.4e2 6.6e3 5.9e4 45.5
        gigaword softmax | 39.4 6.5e3 3.7e4 53.5
        gigaword hebbian | 33.2 3.2e3 1.6e4 43.7
    """)
    ours = {
        f"{text} {model}": tuple(number for number in numbers if number is not None)
        for (text, model), numbers in rae2018_language.PAPER_BY_FREQUENCY.items()
    }
    assert ours == table
    paper = rae2018_language.PRESETS["paper"]
    assert (paper.hidden_size, paper.embedding_size, paper.batch_size, paper.segment) == (2048, 2048, 512, 100)
    assert (paper.gamma, paper.limit, paper.input_dropout, paper.carry_state) == (0.25, 500, 0.3, False)
    assert (paper.memory_size, paper.neighbours, paper.local_rates) == (10_000, (1024,), (0.3,))
    assert {preset.gamma for name, preset in rae2018_language.PRESETS.items() if name.startswith("paper-")} == {0.1}


def test_sprechmann2018_table_1():
    table = rows("""
        novel mbpa | 46.2 64.5 65.7 27.4 57.7 63.0
        novel non-parametric | 40.0 53.3 52.9 28.3 47.9 51.8
        novel mixture | 31.6 56.0 59.1 18.6 47.4 54.7
        novel parametric | 16.2 53.6 57.9 5.7 41.7 51.9
        pre-trained mbpa | 68.5 70.9 70.9 71.4 70.3 70.3
        pre-trained non-parametric | 62.7 69.4 70.0 45.9 65.8 68.7
        pre-trained mixture | 71.9 70.3 70.2 74.8 70.6 70.1
        pre-trained parametric | 71.4 68.1 68.8 76.0 68.6 68.3
    """)
    assert {tuple(name.split()): (ns[:3], ns[3:]) for name, ns in table.items()} == incremental_classes.PAPER
    assert incremental_classes.REPORTED == (0.1, 1.0, 3.0)
    unbalanced = incremental_classes.PRESETS["unbalanced"]
    assert (unbalanced.scarce, unbalanced.epochs) == (0.1, 20)  # figure 5
    paper = permuted_mnist.PRESETS["paper"]
    assert (paper.tasks, paper.examples, paper.memories) == (20, 10_000, (100, 500, 1000))  # figure 3


def test_sprechmann2018_table_2_and_appendix_b():
    table = rows("""
        LSTM (ours) | 61.8 59.6 69.3 65.9
        LSTM + cache (ours) | 55.7 55.3 53.2 51.3
        LSTM + MbPA | 54.8 54.3 58.4 56.0
        LSTM + MbPA + cache | 54.8 54.4 51.8 49.4
    """)
    names = ("", "cache_", "mbpa_", "cache_mbpa_")
    assert {
        (model, row): numbers[place : place + 2]
        for row, numbers in zip(names, table.values(), strict=True)
        for model, place in (("ptb", 0), ("wikitext-2", 2))
    } == language.PAPER
    paper = language.PRESETS["paper"]
    assert (paper.memory_size, 256 in paper.neighbours) == (5000, True)
    assert 0.15 in paper.local_rates
    assert (paper.hidden_size, paper.embedding_size) == (1194, 268)
    assert (paper.wikitext_hidden_size, paper.wikitext_embedding_size) == (1853, 241)


NAMES = {"Matching Nets": "matching", "MAML": "maml", "gradient": "gradient", "Hebb": "hebbian"}


@pytest.mark.parametrize(
    ("numbers", "kinds", "text"),
    [
        (
            omniglot.PAPER,
            [(5, 1), (5, 5), (20, 1), (20, 5)],
            """
            Matching Nets | 98.1 98.9 93.8 98.5
            MAML | 98.7 99.9 95.8 98.9
            gradient | 98.3 99.32 94.98 97.47
            Hebb | 99.4 99.77 97.27 98.85
            """,
        ),
        (
            mini_imagenet.PAPER,
            [(5, 1), (5, 5)],
            """
            Matching Nets | 43.6 55.3
            MAML | 48.7 63.1
            gradient | 47.68 59.48
            Hebb | 50.21 64.75
            """,
        ),
        (mini_imagenet.PAPER_RESIDUAL, [(5, 1), (5, 5)], "gradient | 54.14 66.77\n Hebb | 56.84 71.00"),
        (ablation.PAPER, [(5, 1)], "baseline | 50.21"),
    ],
)
def test_munkhdalai2018_tables_1_and_2_and_figure_2(numbers, kinds, text):
    assert numbers == {
        (NAMES.get(name, name), *kind): number
        for name, row in rows(text).items()
        for kind, number in zip(kinds, row, strict=True)
    }


def test_munkhdalai2018_table_3():
    random = rows("Matching Nets | 32.4 36.1 38.2\n gradient | 35.5 45.5 49.2\n Hebb | 43.75 47.65 51.6")
    partition = rows("gradient | 36.1 46.9 52.7\n Hebb | 44.5 48.8 52.8")
    nothing = (None, None, None)
    assert {
        (NAMES[name], shots): (row[shots - 1], partition.get(name, nothing)[shots - 1])
        for name, row in random.items()
        for shots in (1, 2, 3)
    } == penn_treebank.PAPER
