"""The compiled kernels: found, checked and loaded once, through ctypes."""

import ctypes
import sysconfig
from pathlib import Path

NAME = "libfastweights.so"
INTERFACE = 10  # the number that csrc/library.cpp gives


def load(folders: list[Path]) -> tuple[ctypes.CDLL | None, str]:
    """The library from the first folder that has it and its instruction set, or None and the reason."""
    path = next((folder / NAME for folder in folders if (folder / NAME).exists()), None)
    if path is None:
        return None, (
            f"{NAME} was not built: the package was installed without a C++ compiler, or runs uninstalled; "
            "install g++ and then fastweights again"
        )
    try:
        library = ctypes.CDLL(str(path))
        interface = library.fastweights_interface()
    except (OSError, AttributeError) as error:
        return None, f"{path} could not be loaded: {error}"
    if interface != INTERFACE:
        return None, f"{path} has interface {interface}, this package needs {INTERFACE}; install fastweights again"
    library.fastweights_instruction_set.restype = ctypes.c_char_p
    return library, library.fastweights_instruction_set().decode()


_PACKAGE = Path(__file__).parent.parent
# An editable install keeps what was built in site-packages, away from the sources.
LIBRARY, STATUS = load([_PACKAGE, Path(sysconfig.get_path("platlib")) / _PACKAGE.name])
MISSING = STATUS if LIBRARY is None else None
