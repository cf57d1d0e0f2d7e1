"""Scores of models that are trained already: comparisons of classifiers, scores of texts, dynamic evaluation."""

from fastweights.evaluation.comparison import Comparison, Measured, Scores, calibration_error, compare
from fastweights.evaluation.dynamic_evaluation import choose_learning_rate, evaluate_dynamically, measure_gradients
from fastweights.evaluation.language_scores import (
    FrequencyBucket,
    StreamMemory,
    by_frequency,
    evaluate_language_model,
    perplexity,
    score_text,
)

__all__ = [
    "Comparison",
    "FrequencyBucket",
    "Measured",
    "Scores",
    "StreamMemory",
    "by_frequency",
    "calibration_error",
    "choose_learning_rate",
    "compare",
    "evaluate_dynamically",
    "evaluate_language_model",
    "measure_gradients",
    "perplexity",
    "score_text",
]
