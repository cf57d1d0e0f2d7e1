"""What every part refuses as a size."""


def check_sizes(**sizes: int) -> None:
    """Refuse what is no size, by its name.

    Raises:
        ValueError: one is not an integer of at least 1.
    """
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {size!r}")
