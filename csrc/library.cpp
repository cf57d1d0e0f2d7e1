#include "dispatch.hpp"
#include "pages.hpp"

// Raised with every change of an entry point; src/fastweights/ops/_native.py asks for the same number.
FASTWEIGHTS_EXPORT int fastweights_interface() { return 31; }

FASTWEIGHTS_EXPORT const char* fastweights_instruction_set() { return fastweights::Level::current().name; }

FASTWEIGHTS_EXPORT void fastweights_prefer_large_pages(void* start, std::int64_t bytes) {
    fastweights::prefer_large_pages(start, static_cast<std::size_t>(bytes));
}
