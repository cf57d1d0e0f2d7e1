// Sequences packed into one row: where each begins, and the end of the last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>

namespace fastweights {

inline void check_bounds(const std::int64_t* bounds, std::int64_t sequences, std::int64_t steps) {
    if (bounds && (bounds[0] != 0 || bounds[sequences] != steps || !std::is_sorted(bounds, bounds + sequences + 1)))
        throw std::domain_error("the bounds of the packed sequences do not ascend from the first step to the last");
}

}  // namespace fastweights
