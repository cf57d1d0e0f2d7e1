import dataclasses

import pytest

from fastweights.reproduce.munkhdalai2018 import omniglot

from .helpers import result


@pytest.mark.data
@pytest.mark.slow
def test_a_minute_of_real_characters_is_far_above_chance(omniglot_root, tmp_path):
    settings = dataclasses.replace(
        omniglot.PRESETS["quick"], models=("hebbian",), data_dir=omniglot_root, tasks=12_800, validate_every=6400
    )
    omniglot.run(settings, tmp_path)
    accuracies = {row["metric"]: row["ours"][0] for row in result(tmp_path)["rows"]}
    assert accuracies["5-way 1-shot test accuracy, %"] > 70
    assert accuracies["20-way 1-shot test accuracy, %"] > 45
