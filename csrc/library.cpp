#include "dispatch.hpp"

// Raised with every change of an entry point; src/fastweights/ops/_native.py asks for the same number.
FASTWEIGHTS_EXPORT int fastweights_interface() { return 30; }

FASTWEIGHTS_EXPORT const char* fastweights_instruction_set() { return fastweights::Level::current().name; }
