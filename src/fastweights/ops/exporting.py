"""Models on their way to ONNX, which has no custom operators."""

import torch


def is_exporting_onnx() -> bool:
    """Return whether `torch.onnx.export` is at work: recurrences are then those of the references.

    Examples:
        >>> from fastweights.ops.exporting import is_exporting_onnx
        >>> is_exporting_onnx()
        False
    """
    # In this order: the second question loads the exporter.
    return torch.compiler.is_exporting() and torch.onnx.is_in_onnx_export()
