"""Layers of this library inside other libraries; each module needs the library of its name."""
