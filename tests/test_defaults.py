"""The defaults of functions and classes outside `nn`: whoever leaves an argument out gets other numbers if one changes.

Those of `nn` are in `tests/nn/test_signatures.py`.
"""

import importlib
import inspect
from typing import Any

import pytest

from fastweights import evaluation, few_shot, memory, training

DEFAULTS: dict[str, dict[str, Any]] = {
    "ops.associative:Constants": dict(
        inner_steps=1, nonlinearity="relu", normalize_initial=False, eps=1e-05, hold_input=True
    ),
    "ops.associative:associative": dict(impl="auto", form="auto"),
    "ops.associative:associative_with_memory": dict(impl="auto", form="auto"),
    "ops.conv_block:conv_leaky_max_pool": dict(slope=0.2, impl="auto"),
    "ops.conv_block:leaky_max_pool": dict(slope=0.2, impl="auto"),
    "ops.conv_block:run_blocks": dict(slope=0.2, impl="auto"),
    "ops.delta:delta_rule": dict(output_final_state=False, impl="auto"),
    "ops.delta:gated_delta_rule": dict(output_final_state=False, impl="auto"),
    "ops.delta:linear_attention": dict(output_final_state=False, impl="auto"),
    "ops.delta:simple_gla": dict(output_final_state=False, impl="auto"),
    "ops.gated:gated": dict(layer_norm="after", impl="auto"),
    "ops.hebbian:smooth": dict(counting="literal", largest_norm=10.0, impl="auto"),
    "ops.lstm:lstm": dict(impl="auto"),
    "ops.selective_scan:selective_scan": dict(delta_softplus=False, return_last_state=False, impl="auto"),
    "ops.selective_scan:selective_state_update": dict(dt_softplus=False, impl="auto"),
    "ops.short_convolution:short_convolution": dict(impl="auto"),
    "memory:AdaptiveClassifier": dict(capacity=10000),
    "memory:AdaptiveClassifier.fit": dict(unknown_rate=0.05, old_loss=0.01, batch_size=256),
    "memory:AdaptiveLanguageModel": dict(bos_token_id="auto"),
    "memory:AdaptiveLanguageModel.score": dict(remember=True),
    "memory:AdaptiveLanguageModel.score_each": dict(remember=True),
    "memory:EpisodicMemory.search": dict(epsilon=0.001),
    "memory:EpisodicMemory.open": dict(repair=False),
    "memory:FaissIndex": dict(factory="Flat", probes=16),
    "memory:FaissIndex.search": dict(epsilon=0.001),
    "memory:MbPA": dict(
        neighbours=256, steps=1, penalty=0.0, optimizer="sgd", epsilon=0.001, max_prediction_bytes=2**29
    ),
    "memory:NGramCache": dict(order=8, growth=8.0, prior=1024.0),
    "memory:NGramCache.recall": dict(own=True),
    "memory:NeuralCache": dict(theta=0.3),
    "memory:StreamMbPA": dict(neighbours=256, steps=1, penalty=0.0, epsilon=0.001, half=False),
    "memory:UnboundedCache": dict(neighbours=1024),
    "memory:widen_output": dict(classes=1),
    "few_shot:MAML": dict(hidden_size=288, steps=1, second_order=True),
    "few_shot:ConvEncoder": dict(
        blocks=5, standardise=False, interpolated=False, mirrored=False, dropout=0.0, half=False
    ),
    "few_shot:FastWeightsHead": dict(
        hidden_size=288,
        rule="hebbian",
        hidden="both",
        softmax="slow",
        inverse_start=True,
        label_noise=0.0,
        stop_gradient=False,
        second_order=False,
    ),
    "few_shot:FewShotClassifier": dict(ink=False),
    "few_shot:FewShotClassifier.describe": dict(resize=False),
    "few_shot:FewShotClassifier.predict": dict(resize=False),
    "few_shot:FineTuning": dict(steps=100, lr=1.0, weight_decay=0.001),
    "few_shot:FineTuningHead": dict(steps=100, lr=1.0, weight_decay=0.001),
    "few_shot:MatchingHead": dict(scale=1.0),
    "few_shot:ResidualEncoder": dict(channels=3, size=84, widths=(64, 96, 128, 256), features=1024, half=False),
    "few_shot:SentenceEncoder": dict(embedding_size=300, hidden_size=200, num_layers=2, read_after=0, half=False),
    "evaluation:by_frequency": dict(edges=(100, 1000, 10000)),
    "evaluation:choose_learning_rate": dict(rates=tuple(10 ** (power / 2) for power in range(-8, -1)), segment=5),
    "evaluation:compare": dict(batch_size=100),
    "evaluation:evaluate_dynamically": dict(decay=0.0, segment=5, epsilon=2e-05),
    "evaluation:evaluate_language_model": dict(streams=1),
    "evaluation:measure_gradients": dict(streams=100, segment=5),
    "evaluation:score_text": dict(segment=2048),
    "training:ActorCriticSchedule": dict(
        batch_size=128,
        learning_rate=0.001,
        annealing="none",
        clip_norm=5.0,
        patience=1000000,
        checkpoint_seconds=30.0,
        updates=100,
        steps=16,
        discount=0.99,
        entropy=0.01,
        value=0.5,
        episodes=100,
    ),
    "training:CurriculumSchedule": dict(
        batch_size=128,
        learning_rate=0.001,
        annealing="none",
        clip_norm=5.0,
        patience=5,
        checkpoint_seconds=30.0,
        test_every=20,
        first_classes=30,
        added_classes=5,
        last_classes=200,
        threshold=0.6,
    ),
    "training:ElasticWeightConsolidation": dict(output="softmax"),
    "training:EpisodeSchedule": dict(
        tasks_per_step=1,
        validate_every=400,
        validation_tasks=400,
        test_tasks=1000,
        learning_rate=0.001,
        annealing="none",
        averaging=0.0,
        weight_decay=0.0,
        checkpoint_seconds=30.0,
    ),
    "training:LanguageSchedule": dict(
        batch_size=32,
        learning_rate=0.001,
        annealing="none",
        clip_norm=5.0,
        patience=5,
        checkpoint_seconds=30.0,
        segment=35,
        validation_streams=10,
        carry_state=True,
        sampled=0,
        plain_epochs=0,
        bfloat16=False,
    ),
    "training:Schedule": dict(
        batch_size=128, learning_rate=0.001, annealing="none", clip_norm=5.0, patience=5, checkpoint_seconds=30.0
    ),
    "training:StreamSchedule": dict(
        batch_size=128,
        learning_rate=0.001,
        annealing="none",
        clip_norm=5.0,
        patience=5,
        checkpoint_seconds=30.0,
        segment=32,
        reset=0.0,
        optimizer="nadam",
    ),
    "training:evaluate": dict(batch_size=1000),
    "training:play": dict(likeliest=False),
    "training:train_epochs": dict(keep_newest=False, shared=False),
    "tasks.text:load_folder": dict(least_count=2, prose=False, pattern="**/*.txt"),
    "tasks.omniglot:load": dict(size=28),
    "tasks.omniglot:few_shot_split": dict(by="class", seed=0),
    "tasks.omniglot:augment": dict(degrees=30.0, shift=2.0),
    "tasks.recall:sample": dict(
        steps=64, pairs=4, updates=0, vocabulary_size=8192, power_a=0.01, random_non_queries=True
    ),
    "tasks.recall:floor": dict(steps=64, pairs=4, updates=0, power_a=0.01),
    "tasks.missing_word:load": dict(sentences=4, seed=0),
    "tasks.mini_imagenet:augment": dict(least_area=0.5, light=0.4),
    "tasks.image_folder:load": dict(size=84, ink=False, channels=3),
    "tasks.gated_retrieval:splits": dict(sizes=(100000, 5000, 5000)),
    "tasks.associative_retrieval:sample": dict(pairs=4),
    "tasks.associative_retrieval:splits": dict(sizes=(100000, 10000, 20000), pairs=4),
    "tasks.associative_retrieval:floor": dict(pairs=4),
    "tasks.holding:sample_sums": dict(steps=30),
    "tasks.holding:sample_copies": dict(copied=5, blanks=10, symbols=8),
    "tasks.holding:sample_cards": dict(back=3, dealt=52),
    "tasks.state_tracking:sample": dict(group="parity"),
    "tasks.state_tracking:floor": dict(group="parity"),
    "tasks.catch_environments:CatchEnv": dict(size=16, visible=3),
    "tasks.catch_environments:CatchVectorEnv": dict(num_envs=1, size=16, visible=3),
    "tasks.faces:load_multi_pie": dict(test_identities=20, validation_identities=20, seed=0),
    "tasks.catch:CatchGames": dict(size=16, visible=3),
    "tasks.catch:floor": dict(size=16),
}


def find_defaults(function) -> dict[str, Any]:
    """Return the defaults of a function but for those that are None, empty, or words that are shown."""
    parameters = inspect.signature(function).parameters.values()
    return {
        each.name: each.default
        for each in parameters
        if isinstance(each.default, bool | int | float | str | tuple)
        and each.default not in ("", ())
        and each.name not in ("title", "message")
    }


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_documented_ones(name):
    module, _, path = name.rpartition(":")
    if module == "tasks.catch_environments":
        pytest.importorskip("gymnasium", reason="gymnasium is not installed")
    found = importlib.import_module(f"fastweights.{module}")
    for part in path.split("."):
        found = getattr(found, part)
    assert find_defaults(found) == DEFAULTS[name]


@pytest.mark.parametrize("package", [memory, few_shot, evaluation, training])
def test_no_class_and_no_function_is_left_out(package):
    module = package.__name__.removeprefix("fastweights.")
    for name in package.__all__:
        part = getattr(package, name)
        if callable(part) and f"{module}:{name}" not in DEFAULTS and part.__module__.startswith(package.__name__):
            assert not find_defaults(part), name
