// A matrix in the order in which a product reads it.
#pragma once

#include <cstdint>

namespace fastweights {

// The rows x columns matrix `weight`, or the transpose of a columns x rows one, in panels of `panel` rows, column by
// column, the last panel filled with zeros.
template <class T>
void pack(const T* weight, std::int64_t rows, std::int64_t columns, bool transposed, std::int64_t panel, T* to) {
    for (std::int64_t start = 0; start < rows; start += panel)
        for (std::int64_t j = 0; j < columns; ++j)
            for (std::int64_t i = start; i < start + panel; ++i)
                *to++ = i >= rows ? T(0) : weight[transposed ? j * rows + i : i * columns + j];
}

}  // namespace fastweights
