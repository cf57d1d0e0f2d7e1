import re

import pytest
import torch
from torch.nn import functional as F

from fastweights import few_shot


def small(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return few_shot.SentenceEncoder(20, **({"embedding_size": 5, "hidden_size": 4} | options)).to(dtype)


def sentences(lengths, longest=None, vocabulary_size=20):
    words = torch.randint(1, vocabulary_size, (len(lengths), longest or max(lengths)))
    words[torch.arange(words.shape[1]) >= torch.tensor(lengths)[:, None]] = 0
    return words


@pytest.mark.parametrize("layers", [1, 2])
def test_it_is_torchs_lstm_over_each_sentence_alone(layers):
    encoder = small(torch.float64, num_layers=layers)
    lengths = [3, 7, 1, 7, 5]
    words = sentences(lengths)
    features = encoder(words)
    for row, length, found in zip(words, lengths, features, strict=True):
        outputs, _ = encoder.lstm(encoder.embedding.weight[row[:length]])
        torch.testing.assert_close(found, outputs[-1], rtol=1e-12, atol=1e-12)


def test_its_steps_are_those_of_the_equations():
    encoder = small(torch.float64)
    words = torch.tensor([[4, 9, 2]])
    weights = {name: part.detach() for name, part in encoder.lstm.named_parameters()}
    x = encoder.embedding.weight[words[0]].detach()
    for layer in range(2):
        h = c = torch.zeros(4, dtype=torch.float64)
        outputs = []
        for step in x:
            gates = weights[f"weight_ih_l{layer}"] @ step + weights[f"weight_hh_l{layer}"] @ h
            i, f, g, o = (gates + weights[f"bias_ih_l{layer}"] + weights[f"bias_hh_l{layer}"]).chunk(4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        x = torch.stack(outputs)
    torch.testing.assert_close(encoder(words)[0], x[-1], rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_each_sentence_alone():
    encoder = small(torch.float64)
    lengths = [3, 7, 1]
    words, direction = sentences(lengths), torch.randn(3, 4, dtype=torch.float64)
    parameters = list(encoder.parameters())
    together = torch.autograd.grad((encoder(words) * direction).sum(), parameters)
    alone = [encoder(row[None, :length])[0] for row, length in zip(words, lengths, strict=True)]
    expected = torch.autograd.grad((torch.stack(alone) * direction).sum(), parameters)
    for ours, theirs in zip(together, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert not together[0][0].any()  # the padding's embedding


def test_more_padding_changes_nothing():
    encoder, words = small(), sentences([3, 7, 1])
    assert torch.equal(encoder(F.pad(words, (0, 9))), encoder(words))


def test_a_sentence_does_not_depend_on_the_others_or_their_order():
    encoder, words = small(), sentences([2, 6, 6, 1, 4])
    features, order = encoder(words), torch.tensor([3, 0, 4, 2, 1])
    torch.testing.assert_close(encoder(words[order]), features[order])
    for sentence, found in zip(words, features, strict=True):
        torch.testing.assert_close(encoder(sentence[None])[0], found)


@pytest.mark.parametrize("hidden_size", [200, 300])
def test_the_papers_sizes(hidden_size):
    encoder = few_shot.SentenceEncoder(1000, hidden_size=hidden_size)
    assert encoder.embedding.weight.shape == (1000, 300)
    assert encoder.lstm.num_layers == 2
    assert encoder(sentences([80, 22, 5], vocabulary_size=1000)).shape == (3, encoder.features) == (3, hidden_size)


def test_the_smallest_sizes():
    encoder = few_shot.SentenceEncoder(2, embedding_size=1, hidden_size=1, num_layers=1)
    assert encoder(torch.tensor([[1]])).shape == (1, 1)


def test_weights_start_as_the_docstring_says():
    torch.manual_seed(0)
    encoder = few_shot.SentenceEncoder(1000)
    assert not encoder.embedding.weight[0].any()
    assert encoder.embedding.weight[1:].std().item() == pytest.approx(1, rel=0.02)
    for layer, inputs in ((0, 300), (1, 200)):
        weights = {name: part for name, part in encoder.lstm.named_parameters() if name.endswith(str(layer))}
        assert weights[f"weight_ih_l{layer}"].std().item() == pytest.approx((2 / inputs) ** 0.5, rel=0.02)
        assert weights[f"weight_hh_l{layer}"].std().item() == pytest.approx((2 / 200) ** 0.5, rel=0.02)
        bias = (weights[f"bias_ih_l{layer}"] + weights[f"bias_hh_l{layer}"]).view(4, 200)
        assert torch.equal(bias, torch.tensor([0.0, 1.0, 0.0, 0.0])[:, None].expand(4, 200))


def test_it_is_saved_and_read_again():
    encoder = small()
    other, words = few_shot.SentenceEncoder(20, embedding_size=5, hidden_size=4), sentences([3, 7, 1])
    other.load_state_dict(encoder.state_dict())
    assert torch.equal(other(words), encoder(words))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_size": 0}, "vocabulary_size must be an integer of at least 1, got 0"),
        ({"embedding_size": "300"}, "embedding_size must be an integer of at least 1, got '300'"),
        ({"hidden_size": -2}, "hidden_size must be an integer of at least 1, got -2"),
        ({"num_layers": 0.5}, "num_layers must be an integer of at least 1, got 0.5"),
    ],
)
def test_what_is_no_size_is_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        few_shot.SentenceEncoder(**({"vocabulary_size": 20} | options))


SHAPE = "words must be [N,T] int64, N and T at least 1: N sentences of T words or fewer, filled up with 0; got "


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (torch.ones(3).long(), SHAPE + "[3] torch.int64"),
        (torch.ones(3, 2), SHAPE + "[3, 2] torch.float32"),
        (torch.ones(0, 2).long(), SHAPE + "[0, 2] torch.int64"),
        (torch.ones(3, 0).long(), SHAPE + "[3, 0] torch.int64"),
        (torch.tensor([[1, 20]]), "words must lie between 0, for padding, and 19; got 1 to 20"),
        (torch.tensor([[1, -1]]), "words must lie between 0, for padding, and 19; got -1 to 1"),
        (torch.tensor([[1, 2], [0, 0]]), "sentence 1 is empty: give it at least one word"),
        (
            torch.tensor([[1, 2, 3], [3, 0, 2]]),
            "a sentence's words must come before its padding of 0; sentence 1 has 0 before a word",
        ),
        (
            torch.tensor([[0, 2]]),
            "a sentence's words must come before its padding of 0; sentence 0 has 0 before a word",
        ),
    ],
)
def test_what_are_no_sentences_is_refused(words, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        small()(words)


def test_a_few_shot_network_learns_with_it():
    encoder = small()
    network = few_shot.FewShotNetwork(encoder, few_shot.FastWeightsHead(4, num_classes=2, hidden_size=8))
    words, index = sentences([3, 7, 1, 5, 4, 2, 6, 7]), torch.arange(8).view(2, 4)
    labels = torch.tensor([0, 1]).expand(2, 2)
    loss = F.cross_entropy(network(words, index[:, :2], labels, index[:, 2:]).flatten(0, 1), labels.flatten())
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in encoder.parameters())
    memory = network.describe(words.view(2, 4, 7)[:, :2], labels)  # tasks of sentences
    assert network.predict(words.view(2, 4, 7)[:, 2:], memory).shape == (2, 2, 2)


def gapped():
    """Sentences of 2 to 9 words, the blank, 1, somewhere in each."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(2, 20, (30, 9), generator=generator)
    lengths = torch.randint(2, 10, (30,), generator=generator)
    words[torch.arange(9) >= lengths.unsqueeze(1)] = 0
    places = (torch.rand(30, generator=generator) * lengths).long()
    words[torch.arange(30), places] = 1
    return words, lengths, places


@pytest.mark.parametrize("read_after", [0, 2, 50])
def test_read_beside_the_blank_it_is_the_sentence_up_to_there(read_after):
    words, lengths, places = gapped()
    torch.manual_seed(0)
    whole = few_shot.SentenceEncoder(20, embedding_size=6, hidden_size=5)
    beside = few_shot.SentenceEncoder(20, embedding_size=6, hidden_size=5, blank=1, read_after=read_after)
    beside.load_state_dict(whole.state_dict())
    found = beside(words)
    for sentence, length, place, state in zip(words, lengths, places, found, strict=True):
        shown = sentence[: min(int(length), int(place) + 1 + read_after)]
        assert torch.allclose(whole(shown.unsqueeze(0))[0], state, atol=1e-6)


def test_in_half_precision_it_gives_nearly_the_same_in_the_same_order():
    words, _, _ = gapped()
    torch.manual_seed(0)
    exact = few_shot.SentenceEncoder(20, embedding_size=6, hidden_size=5, blank=1)
    half = few_shot.SentenceEncoder(20, embedding_size=6, hidden_size=5, blank=1, half=True)
    half.load_state_dict(exact.state_dict())
    assert half(words).dtype == torch.float32
    assert torch.allclose(half(words), exact(words), atol=0.03)
    assert half(words[:1]).shape == (1, 5)
    half(words).sum().backward()
    assert all(parameter.grad is not None for parameter in half.parameters())


def test_half_precision_is_float32_where_the_lstm_does_not_run_in_it(monkeypatch):
    monkeypatch.setattr("fastweights.few_shot.encoders.sentence.lstm_takes_bfloat16", lambda device: False)
    torch.manual_seed(0)
    encoder = few_shot.SentenceEncoder(20, embedding_size=6, hidden_size=5, half=True)
    words = torch.randint(1, 20, (7, 4))
    halved = encoder(words)
    encoder.half_precision = False
    torch.testing.assert_close(halved, encoder(words))


def test_a_sentence_without_a_blank_and_a_blank_that_is_no_word_are_refused():
    encoder = few_shot.SentenceEncoder(20, blank=1)
    with pytest.raises(ValueError, match="a sentence must have the blank, 1; sentence 1 has none"):
        encoder(torch.tensor([[1, 2], [3, 2]]))
    with pytest.raises(ValueError, match="blank must be a word, 1 to 19, or None; got 20"):
        few_shot.SentenceEncoder(20, blank=20)
    with pytest.raises(ValueError, match=r"read_after must be an integer of 0 and up, .*; got -1"):
        few_shot.SentenceEncoder(20, blank=1, read_after=-1)
    with pytest.raises(ValueError, match=r"read_after must be an integer .*; got 1\.5"):
        few_shot.SentenceEncoder(20, blank=1, read_after=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"blank must be a word, 1 to 19, or None; got 2\.5"):
        few_shot.SentenceEncoder(20, blank=2.5)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler itself, which hides it but from pytest
def test_compiled_it_gives_and_refuses_the_same():
    encoder = small()
    compiled = torch.compile(encoder, backend="aot_eager")
    for lengths in ([3, 1], [2, 5], [4, 4, 1]):  # the first while the compiler has yet to see what stays outside
        words = sentences(lengths)
        torch.testing.assert_close(compiled(words), encoder(words))
    with pytest.raises(ValueError, match="sentence 1 is empty"):
        compiled(torch.tensor([[3, 4], [0, 0]]))
