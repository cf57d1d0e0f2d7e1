"""Layers whose linear parts PyTorch has quantised: the same answers but for rounding, or one line."""

import copy

import pytest
import torch

from fastweights import memory, nn

from ..memory.language_models import make_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def quantise(module):
    return torch.ao.quantization.quantize_dynamic(copy.deepcopy(module).eval(), {torch.nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.FastWeightProgrammer(8, 2),
        lambda: nn.FastWeightsRNN(8, 4),
        lambda: nn.HyperLSTM(8, 4),
        lambda: nn.AssociativeLSTM(8, 4),
        lambda: nn.IRNN(8, 4),
    ],
)
def test_layers_answer_as_before_but_for_rounding(make):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(5, 2, 8)
    with torch.no_grad():
        torch.testing.assert_close(quantise(layer)(x)[0], layer(x)[0], rtol=0, atol=0.05)


def test_a_layer_that_multiplies_by_its_weights_itself_says_so():
    layer = quantise(nn.GatedFastWeightsRNN(8, 4))
    with pytest.raises(
        TypeError, match=r"slow_in was replaced by a torch\.ao.*: GatedFastWeightsRNN multiplies by the we"
    ):
        layer(torch.randn(5, 2, 8))


def test_the_loss_of_a_language_model_is_that_of_its_logits():
    torch.manual_seed(0)
    model = nn.LSTMLanguageModel(vocabulary_size=20, embedding_size=8, hidden_size=8, tied=False).eval()
    words = torch.randint(20, (6, 3))
    with torch.no_grad():
        expected, found = model.loss(words, words)[0], quantise(model).loss(words, words)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)
    with pytest.raises(ValueError, match="target 20 at"):
        quantise(model).loss(words, words + 20 - words.max())


def test_a_quantised_language_model_is_adapted():
    torch.manual_seed(0)
    lm = memory.AdaptiveLanguageModel(quantise(make_model()))
    ids = torch.arange(200) % 7 + 3
    lm.fit(ids)
    assert lm.names == ["model", "cache", "knn", "ngram"]  # MbPA needs the output's weights
    lm.write(ids)
    assert lm.score(ids[None], remember=False).mean() > lm.score_plain(ids[None]).mean()
