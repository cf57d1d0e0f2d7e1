"""The model card of a run's network."""

import json
import re

import pytest

from fastweights import FewShotClassifier, nn
from fastweights.errors import RunError
from fastweights.report import model_card
from tests.fake_runs import WriteRun

RESULTS = "docs/results/munkhdalai2018-omniglot"


def test_the_card_of_the_published_classifier_has_the_papers_numbers_and_ours(pytestconfig):
    classifier = FewShotClassifier.load("omniglot")
    card = model_card(classifier, pytestconfig.rootpath / RESULTS, "hebbian-seed1", licence=classifier.licence)
    assert "| Fast weights, Hebbian | 288 | 5-way 1-shot test accuracy, % | 99.40 | 99.03 (1 seed) |" in card
    assert "Matching Networks |" not in card
    assert "fastweights reproduce munkhdalai2018/omniglot --preset paper" in card
    assert "## What differs from the paper" in card
    assert "license: other" in card
    assert f"Licence: {classifier.licence}." in card


def test_a_member_that_is_not_there_is_named_with_those_that_are(write_run: WriteRun):
    with pytest.raises(RunError, match=r"has no finished member 'mine'; finished are .*seed1"):
        model_card(nn.IRNN(3, 4), write_run(), "mine")


def test_names_and_settings_are_no_markup_in_a_card(write_run: WriteRun):
    hostile = "<script>x</script>![](http:elsewhere)|\n# one"
    run = write_run([("LSTM", 50, 1.85, [2.31])], experiment=hostile, preset=hostile, command=f"a ``` {hostile}")
    (run / "lstm-50-seed1").rename(run / "<b>![](x)")
    (member,) = run.glob("*/")
    settings = {"model": hostile, "hidden_size": 50, "seed": 1, "<b>": "![](http:elsewhere)"}
    (member / "settings.json").write_text(json.dumps(settings))
    (member / "environment.json").write_text(json.dumps({"torch": hostile}))
    result = json.loads((run / "result.json").read_text())
    result["rows"][0].update(model=hostile, metric=hostile)
    result["changes"] = {member.name: {"<b>": ["![](http://elsewhere)", 1]}}
    (run / "result.json").write_text(json.dumps(result))
    card = model_card(nn.IRNN(3, 4), run, member.name, licence=hostile)
    assert r"&lt;b&gt; !\[\](http://elsewhere) (1)" in card
    assert r"Licence: &lt;script&gt;x&lt;/script&gt;!\[\](http:elsewhere)\| # one." in card
    prose = re.sub(r"(?ms)^(```+)\w+\n.*?^\1$", "", card)  # fenced code is shown as it is
    assert "Train it again" in prose
    assert not re.search(r"<|!\[\]|^# one", prose)
