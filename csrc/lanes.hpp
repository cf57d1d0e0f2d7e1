// Sequences side by side in the lanes of vector registers.
//
// A chunk is two registers of sequences. A vector of H numbers for every sequence of the chunk is H rows of two
// registers: sums over H are plain additions, and no step depends on how many sequences a batch has. The width follows
// the instruction set: a function here is inlined into a caller that was compiled for that set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "registers.hpp"

namespace fastweights {

// One number of every sequence of a chunk.
template <class T, int Bytes>
struct Row {
    using R = Registers<T, Bytes>;
    using V = typename R::V;
    V a, b;

    FASTWEIGHTS_INLINE Row operator+(const Row& y) const { return {a + y.a, b + y.b}; }
    FASTWEIGHTS_INLINE Row operator-(const Row& y) const { return {a - y.a, b - y.b}; }
    FASTWEIGHTS_INLINE Row operator*(const Row& y) const { return {a * y.a, b * y.b}; }
    FASTWEIGHTS_INLINE Row operator*(T y) const { return {a * y, b * y}; }
    FASTWEIGHTS_INLINE Row operator+(T y) const { return {a + y, b + y}; }
    FASTWEIGHTS_INLINE Row& operator+=(const Row& y) { return *this = *this + y; }

    template <class Function>
    FASTWEIGHTS_INLINE Row map(Function f) const {
        return {f(a), f(b)};
    }
    template <class Function>
    FASTWEIGHTS_INLINE Row map(const Row& y, Function f) const {
        return {f(a, y.a), f(b, y.b)};
    }
    FASTWEIGHTS_INLINE T sum() const { return R::sum(a + b)[0]; }
};

template <class T, int Bytes>
struct Lanes {
    using Row = fastweights::Row<T, Bytes>;
    using R = Registers<T, Bytes>;
    using V = typename R::V;
    static constexpr int width = R::width;
    static constexpr int chunk = 2 * width;
    static constexpr int tile = Bytes == 64 ? 8 : 4;  // rows of a matrix product held in registers at once
    // Long sums are sums of runs of so many terms: rounding grows with the run and the number of runs, not their product.
    static constexpr int run = 16;

    // rows[i] <- the i-th number of every sequence; source[lane] points at that sequence's `size` numbers, or is null
    // for a lane without a sequence, which reads zeros.
    static FASTWEIGHTS_OUTLINE void gather(const T* const* source, int size, Row* rows) {
        for_blocks(size, [&](int half, int i, int count) FASTWEIGHTS_INLINE_LAMBDA {
            V block[width];
            for (int lane = 0; lane < width; ++lane) {
                const T* const from = source[half * width + lane];
                block[lane] = V{};
                if (from != nullptr) std::memcpy(&block[lane], from + i, count * sizeof(T));
            }
            R::transpose(block);
            for (int k = 0; k < count; ++k) (half ? rows[i + k].b : rows[i + k].a) = block[k];
        });
    }

    static FASTWEIGHTS_OUTLINE void scatter(const Row* rows, int size, T* const* target) {
        for_blocks(size, [&](int half, int i, int count) FASTWEIGHTS_INLINE_LAMBDA {
            V block[width];
            for (int k = 0; k < width; ++k) block[k] = k < count ? (half ? rows[i + k].b : rows[i + k].a) : V{};
            R::transpose(block);
            for (int lane = 0; lane < width; ++lane) {
                T* const to = target[half * width + lane];
                if (to != nullptr) std::memcpy(to + i, &block[lane], count * sizeof(T));
            }
        });
    }

    template <class Body>
    static FASTWEIGHTS_INLINE void for_blocks(int size, Body body) {
        for (int half = 0; half < 2; ++half)
            R::for_blocks(size, [&](int i, int count) FASTWEIGHTS_INLINE_LAMBDA { body(half, i, count); });
    }

    // result[n] <- keys[n] . query for `count` keys of `size` rows, `stride` rows apart.
    static FASTWEIGHTS_OUTLINE void dot(const Row* keys, int count, int stride, int size, const Row* query, Row* result) {
        for_keys<4>(count, [&](int n, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            dot_block<block>(keys + std::int64_t(n) * stride, stride, size, query, result + n);
        });
    }

    // body(n, block) for blocks of Block keys and then for single ones; the block's size is a constant to the compiler.
    template <int Block, class Body>
    static FASTWEIGHTS_INLINE void for_keys(int count, Body body) {
        int n = 0;
        for (; n + Block <= count; n += Block) body(n, std::integral_constant<int, Block>{});
        for (; n < count; ++n) body(n, std::integral_constant<int, 1>{});
    }

    template <int Block>
    static FASTWEIGHTS_INLINE void dot_block(const Row* keys, int stride, int size, const Row* query, Row* result) {
        Row total[Block] = {};
        for (int start = 0; start < size; start += run) {
            const int end = size - start < run ? size : start + run;
            Row sum[Block] = {};
            for (int i = start; i < end; ++i)
                for (int n = 0; n < Block; ++n) sum[n] += keys[n * stride + i] * query[i];
            for (int n = 0; n < Block; ++n) total[n] += sum[n];
        }
        for (int n = 0; n < Block; ++n) result[n] = total[n];
    }

    // The sum of term(0) .. term(size - 1).
    template <class Term>
    static FASTWEIGHTS_INLINE Row sum_of(int size, Term term) {
        Row total = {};
        for (int start = 0; start < size; start += 4 * run) {
            const int end = size - start < 4 * run ? size : start + 4 * run;
            Row sum[4] = {};
            int i = start;
            for (; i + 3 < end; i += 4)
                for (int k = 0; k < 4; ++k) sum[k] += term(i + k);
            for (; i < end; ++i) sum[0] += term(i);
            total += (sum[0] + sum[1]) + (sum[2] + sum[3]);
        }
        return total;
    }

    // result[i] += sum over n of weight[n] keys[n][i].
    static FASTWEIGHTS_OUTLINE void mix(const Row* keys, int count, int stride, int size, const Row* weight, Row* result) {
        for_keys<4>(size, [&](int i, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            for (int start = 0; start < count; start += run) {
                const int end = count - start < run ? count : start + run;
                Row sum[block] = {};
                for (int n = start; n < end; ++n) {
                    const Row* key = keys + std::int64_t(n) * stride + i;
                    for (int k = 0; k < block; ++k) sum[k] += key[k] * weight[n];
                }
                for (int k = 0; k < block; ++k) result[i + k] += sum[k];
            }
        });
    }

    // targets[n] += value[n] g + key[n] query.
    static FASTWEIGHTS_OUTLINE void add_outer(const Row* value, const Row* g, const Row* key, const Row* query, int count,
                                              int stride, int size, Row* targets) {
        for (int n = 0; n < count; ++n) {
            Row* const target = targets + std::int64_t(n) * stride;
            const Row v = value[n], k = key[n];
            for (int i = 0; i < size; ++i) target[i] += v * g[i] + k * query[i];
        }
    }

    // y += M x for a rows x columns matrix M, packed in panels of `tile` rows, column by column, the last panel filled
    // with zeros; y has rows up to the next multiple of `tile`.
    static FASTWEIGHTS_OUTLINE void multiply(const T* packed, int rows, int columns, const Row* x, Row* y) {
        for (int panel = 0; panel < rows; panel += tile) {
            for (int start = 0; start < columns; start += run) {
                const int end = columns - start < run ? columns : start + run;
                Row sum[tile] = {};
                for (int j = start; j < end; ++j, packed += tile)
                    for (int r = 0; r < tile; ++r) sum[r] += x[j] * packed[r];
                for (int r = 0; r < tile; ++r) y[panel + r] += sum[r];
            }
        }
    }

    // result[i, j] += sum over n and over the chunk's sequences of x[n][i] y[n][j].
    static FASTWEIGHTS_OUTLINE void outer(const Row* x, const Row* y, int count, int stride, int size, T* result) {
        constexpr int block = 4;  // block^2 sums and 2 block operands in registers
        constexpr int group = 3 * block;  // rows of x that stay in the nearest cache while y passes by
        for (int i1 = 0; i1 < size; i1 += group)
            for (int j0 = 0; j0 < size; j0 += block)
                for (int i0 = i1; i0 < size && i0 < i1 + group; i0 += block)
                    outer_block<block>(x, y, count, stride, size, i0, j0, result);
    }

    template <int block>
    static FASTWEIGHTS_INLINE void outer_block(const Row* x, const Row* y, int count, int stride, int size, int i0, int j0,
                                               T* result) {
        V sums[block * block] = {};
        // The rows past `size` exist (every vector is padded) and are dropped below.
        for (int n = 0; n < count; ++n) {
            const Row* p = x + std::int64_t(n) * stride + i0;
            const Row* q = y + std::int64_t(n) * stride + j0;
            for (int i = 0; i < block; ++i)
                for (int j = 0; j < block; ++j) sums[block * i + j] += p[i].a * q[j].a + p[i].b * q[j].b;
        }
        T totals[block * block];
        for (int k = 0; k < block * block; k += width) {
            const V total = R::sums_of(sums + k);
            std::memcpy(totals + k, &total, sizeof total);
        }
        for (int i = 0; i < block && i0 + i < size; ++i)
            for (int j = 0; j < block && j0 + j < size; ++j)
                result[std::int64_t(i0 + i) * size + j0 + j] += totals[block * i + j];
    }
};

}  // namespace fastweights
