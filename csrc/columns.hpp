// One sequence at a time, its vectors of H numbers along the lanes of registers.
//
// A vector takes `pitch` numbers: H and zeros up to whole registers. A matrix is its columns, one after the other.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "registers.hpp"

namespace fastweights {

template <class T, int Bytes>
struct Columns {
    using R = Registers<T, Bytes>;
    using V = typename R::V;
    static constexpr int width = R::width;

    static std::int64_t padded(std::int64_t size) { return (size + width - 1) / width * width; }

    static FASTWEIGHTS_INLINE V load(const T* from) {
        V v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
    static FASTWEIGHTS_INLINE void store(V v, T* to) { std::memcpy(to, &v, sizeof v); }

    // y[i] <- f(i) for whole registers; f takes the place of the first of the register's numbers.
    template <class Function>
    static FASTWEIGHTS_INLINE void fill(int pitch, T* y, Function f) {
        for (int i = 0; i < pitch; i += width) store(f(i), y + i);
    }

    // body(i, block): panels of up to four registers, their number a constant to the compiler.
    template <class Body>
    static FASTWEIGHTS_INLINE void for_panels(int pitch, Body body) {
        int i = 0;
        for (; i + 4 * width <= pitch; i += 4 * width) body(i, std::integral_constant<int, 4>{});
        switch ((pitch - i) / width) {
            case 3: return body(i, std::integral_constant<int, 3>{});
            case 2: return body(i, std::integral_constant<int, 2>{});
            case 1: return body(i, std::integral_constant<int, 1>{});
        }
    }

    // y += scale M x, where visit(column, j) may change column j of the panel before it is read. Even and odd columns
    // are summed apart: one sum would wait for each addition before the next.
    template <class Visit>
    static FASTWEIGHTS_INLINE void multiply(const T* x, int columns, int pitch, T scale, T* y, Visit visit) {
        for_panels(pitch, [&](int i, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            V even[block] = {}, odd[block] = {};
            int j = 0;
            for (; j + 1 < columns; j += 2) {
                for (int k = 0; k < block; ++k) even[k] += visit(i, k, j) * x[j];
                for (int k = 0; k < block; ++k) odd[k] += visit(i, k, j + 1) * x[j + 1];
            }
            if (j < columns)
                for (int k = 0; k < block; ++k) even[k] += visit(i, k, j) * x[j];
            for (int k = 0; k < block; ++k)
                store(load(y + i + k * width) + (even[k] + odd[k]) * scale, y + i + k * width);
        });
    }

    // y += scale M x.
    static FASTWEIGHTS_INLINE void multiply(const T* matrix, const T* x, int columns, int pitch, T scale, T* y) {
        multiply(x, columns, pitch, scale, y, [&](int i, int k, int j) FASTWEIGHTS_INLINE_LAMBDA {
            return load(matrix + std::int64_t(j) * pitch + i + k * width);
        });
    }

    // M <- keep M + a b^T (column j: a b[j]), and y += M x.
    static FASTWEIGHTS_INLINE void write_read(T* matrix, T keep, const T* a, const T* b, const T* x, int columns,
                                              int pitch, T* y) {
        multiply(x, columns, pitch, T(1), y, [&](int i, int k, int j) FASTWEIGHTS_INLINE_LAMBDA {
            T* const at = matrix + std::int64_t(j) * pitch + i + k * width;
            const V v = load(at) * keep + load(a + i + k * width) * b[j];
            store(v, at);
            return v;
        });
    }

    // M <- keep M + a b^T + b a^T, and y += M x.
    static FASTWEIGHTS_INLINE void write_both_read(T* matrix, T keep, const T* a, const T* b, const T* x, int columns,
                                                   int pitch, T* y) {
        multiply(x, columns, pitch, T(1), y, [&](int i, int k, int j) FASTWEIGHTS_INLINE_LAMBDA {
            T* const at = matrix + std::int64_t(j) * pitch + i + k * width;
            const V v = load(at) * keep + load(a + i + k * width) * b[j] + load(b + i + k * width) * a[j];
            store(v, at);
            return v;
        });
    }

    // M <- keep M + sum over n of weight[n] a[n] b[n]^T, row i of M: the pitch of a, b and M is the same.
    static FASTWEIGHTS_INLINE void accumulate(T* matrix, T keep, const T* weight, const T* a, const T* b, int count,
                                              int rows, int pitch) {
        constexpr int tile = 4;
        for (int i0 = 0; i0 < rows; i0 += tile) {
            const int height = rows - i0 < tile ? rows - i0 : tile;
            for_panels(pitch, [&](int j, auto block) FASTWEIGHTS_INLINE_LAMBDA {
                V sum[tile][block] = {};
                for (int n = 0; n < count; ++n) {
                    // What lies past the last row is memory of the same arena, and is dropped below.
                    const T* const left = a + std::int64_t(n) * pitch + i0;
                    const T* const right = b + std::int64_t(n) * pitch + j;
                    V scaled[block];
                    for (int k = 0; k < block; ++k) scaled[k] = load(right + k * width) * weight[n];
                    for (int i = 0; i < tile; ++i)
                        for (int k = 0; k < block; ++k) sum[i][k] += scaled[k] * left[i];
                }
                for (int i = 0; i < height; ++i)
                    for (int k = 0; k < block; ++k) {
                        T* const at = matrix + std::int64_t(i0 + i) * pitch + j + k * width;
                        store(load(at) * keep + sum[i][k], at);
                    }
            });
        }
    }

    // target[j][i] <- source[i][j].
    static FASTWEIGHTS_INLINE void transpose(const T* source, std::int64_t source_pitch, int size, T* target,
                                             std::int64_t target_pitch) {
        R::for_blocks(size, [&](int i, int rows) FASTWEIGHTS_INLINE_LAMBDA {
            R::for_blocks(size, [&](int j, int columns) FASTWEIGHTS_INLINE_LAMBDA {
                V block[width] = {};
                for (int k = 0; k < rows; ++k)
                    std::memcpy(&block[k], source + (i + k) * source_pitch + j, columns * sizeof(T));
                R::transpose(block);
                for (int k = 0; k < columns; ++k)
                    std::memcpy(target + (j + k) * target_pitch + i, &block[k], rows * sizeof(T));
            });
        });
    }

    // The scalar product of two vectors.
    static FASTWEIGHTS_INLINE T dot(const T* x, const T* y, int pitch) {
        V total = {};
        for (int i = 0; i < pitch; i += width) total += load(x + i) * load(y + i);
        return R::sum(total)[0];
    }
};

}  // namespace fastweights
