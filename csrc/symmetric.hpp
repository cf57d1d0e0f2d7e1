// Symmetric matrices of one sequence: half the numbers, so that twice as large a matrix stays in the nearest cache.
//
// A matrix is the tiles of its upper triangle, each of `width` columns of `width` rows: (0, 0), (0, 1), (1, 1), (0, 2) and
// so on. A tile beside the diagonal is read once and serves as its mirror image too.
#pragma once

#include "columns.hpp"

namespace fastweights {

template <class T, int Bytes>
struct Symmetric {
    using C = Columns<T, Bytes>;
    using R = typename C::R;
    using V = typename C::V;
    static constexpr int width = C::width;

    static std::int64_t numbers(std::int64_t pitch) {
        const std::int64_t blocks = pitch / width;
        return blocks * (blocks + 1) / 2 * width * width;
    }

    // y += scale M x, where visit(column, i, j) may change the rows from i on of column j before they are read.
    template <class Tiles, class Visit>
    static FASTWEIGHTS_INLINE void multiply(Tiles tile, const T* x, int pitch, T scale, T* y, Visit visit) {
        for (int j = 0; j < pitch; j += width) {
            V mirror[width] = {};  // lane by lane the terms of y[j + k]
            for (int i = 0; i < j; i += width, tile += width * width) {
                const V along = C::load(x + i);
                V even = {}, odd = {};
                for (int k = 0; k < width; ++k) {
                    const V v = visit(tile + k * width, i, j + k);
                    (k % 2 ? odd : even) += v * x[j + k];
                    mirror[k] += v * along;
                }
                C::store(C::load(y + i) + (even + odd) * scale, y + i);
            }
            V even = {}, odd = {};
            for (int k = 0; k < width; ++k) (k % 2 ? odd : even) += visit(tile + k * width, j, j + k) * x[j + k];
            tile += width * width;
            C::store(C::load(y + j) + (even + odd + R::sums_of(mirror)) * scale, y + j);
        }
    }

    // y += scale M x.
    static FASTWEIGHTS_OUTLINE void multiply(const T* tiles, const T* x, int pitch, T scale, T* y) {
        multiply(tiles, x, pitch, scale, y,
                 [](const T* column, int, int) FASTWEIGHTS_INLINE_LAMBDA { return C::load(column); });
    }

    // M <- keep M + a b^T + b a^T, and y += M x.
    static FASTWEIGHTS_INLINE void write_both_read(T* tiles, T keep, const T* a, const T* b, const T* x, int pitch, T* y) {
        multiply(tiles, x, pitch, T(1), y, [&](T* column, int i, int j) FASTWEIGHTS_INLINE_LAMBDA {
            const V v = C::load(column) * keep + C::load(a + i) * b[j] + C::load(b + i) * a[j];
            C::store(v, column);
            return v;
        });
    }

    // M <- keep M + sum over n of weight[-n] a[n] a[n]^T.
    static FASTWEIGHTS_OUTLINE void accumulate(T* tile, T keep, const T* weight, const T* a, int count, int pitch) {
        for (int j = 0; j < pitch; j += width)
            for (int i = 0; i <= j; i += width, tile += width * width) {
                V sum[width] = {};
                for (int n = 0; n < count; ++n) {
                    const T* const row = a + std::int64_t(n) * pitch;
                    const V scaled = C::load(row + i) * weight[-n];
                    for (int k = 0; k < width; ++k) sum[k] += scaled * row[j + k];
                }
                for (int k = 0; k < width; ++k)
                    C::store(C::load(tile + k * width) * keep + sum[k], tile + k * width);
            }
    }

    // rows <- M, all of it, `size` numbers a row.
    static FASTWEIGHTS_OUTLINE void expand(const T* tile, int size, T* rows) {
        for (int j = 0; j < size; j += width)
            for (int i = 0; i <= j; i += width, tile += width * width) {
                V block[width];
                std::memcpy(block, tile, sizeof block);
                const int height = size - i < width ? size - i : width, across = size - j < width ? size - j : width;
                for (int k = 0; k < across; ++k)
                    std::memcpy(rows + std::int64_t(j + k) * size + i, &block[k], height * sizeof(T));
                if (i == j) continue;
                R::transpose(block);
                for (int k = 0; k < height; ++k)
                    std::memcpy(rows + std::int64_t(i + k) * size + j, &block[k], across * sizeof(T));
            }
    }
};

}  // namespace fastweights
