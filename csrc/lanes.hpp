// Sequences side by side in the lanes of vector registers.
//
// A chunk is two registers of sequences. A vector of H numbers for every sequence of the chunk is H rows of two
// registers: sums over H are plain additions, and no step depends on how many sequences a batch has. The width follows
// the instruction set: a function here is inlined into a caller that was compiled for that set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define FASTWEIGHTS_INLINE inline __attribute__((always_inline))
#define FASTWEIGHTS_INLINE_LAMBDA __attribute__((always_inline))

namespace fastweights {

template <class T, int Bytes>
struct Lanes {
    typedef T V __attribute__((vector_size(Bytes)));
    struct Row {
        V a, b;
    };
    static constexpr int width = Bytes / static_cast<int>(sizeof(T));
    static constexpr int chunk = 2 * width;
    static constexpr int tile = Bytes == 64 ? 8 : 4;  // rows of a matrix product held in registers at once
    // Long sums are sums of runs of so many terms: rounding grows with the run and the number of runs, not their product.
    static constexpr int run = 16;

    template <int Step, int... I>
    static FASTWEIGHTS_INLINE void exchange(V& x, V& y, std::integer_sequence<int, I...>) {
        const V low = __builtin_shufflevector(x, y, (I & Step ? width + I - Step : I)...);
        const V high = __builtin_shufflevector(x, y, (I & Step ? width + I : I + Step)...);
        x = low;
        y = high;
    }

    template <int Step>
    static FASTWEIGHTS_INLINE void transpose_from(V* block) {
        if constexpr (Step > 0) {
            for (int i = 0; i < width; ++i)
                if ((i & Step) == 0)
                    exchange<Step>(block[i], block[i + Step], std::make_integer_sequence<int, width>{});
            transpose_from<Step / 2>(block);
        }
    }

    // rows[i] <- the i-th number of every sequence; source[lane] points at that sequence's `size` numbers, or is null
    // for a lane without a sequence, which reads zeros.
    static FASTWEIGHTS_INLINE void gather(const T* const* source, int size, Row* rows) {
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < size; i += width) {
                const int count = size - i < width ? size - i : width;
                V block[width];
                for (int lane = 0; lane < width; ++lane) {
                    const T* from = source[half * width + lane];
                    block[lane] = V{};
                    if (from == nullptr) continue;
                    if (count == width)
                        std::memcpy(&block[lane], from + i, sizeof(V));
                    else
                        std::memcpy(&block[lane], from + i, count * sizeof(T));
                }
                transpose_from<width / 2>(block);
                for (int k = 0; k < count; ++k) (half ? rows[i + k].b : rows[i + k].a) = block[k];
            }
        }
    }

    static FASTWEIGHTS_INLINE void scatter(const Row* rows, int size, T* const* target) {
        for (int half = 0; half < 2; ++half) {
            for (int i = 0; i < size; i += width) {
                const int count = size - i < width ? size - i : width;
                V block[width];
                for (int k = 0; k < width; ++k)
                    block[k] = k < count ? (half ? rows[i + k].b : rows[i + k].a) : V{};
                transpose_from<width / 2>(block);
                for (int lane = 0; lane < width; ++lane) {
                    T* to = target[half * width + lane];
                    if (to == nullptr) continue;
                    if (count == width)
                        std::memcpy(to + i, &block[lane], sizeof(V));
                    else
                        std::memcpy(to + i, &block[lane], count * sizeof(T));
                }
            }
        }
    }

    // result[n] <- keys[n] . query for `count` keys of `size` rows, `stride` rows apart.
    static FASTWEIGHTS_INLINE void dot(const Row* keys, int count, int stride, int size, const Row* query,
                                       Row* result) {
        int n = 0;
        for (; n + 4 <= count; n += 4) dot_block<4>(keys + std::int64_t(n) * stride, stride, size, query, result + n);
        for (; n < count; ++n) dot_block<1>(keys + std::int64_t(n) * stride, stride, size, query, result + n);
    }

    template <int Block>
    static FASTWEIGHTS_INLINE void dot_block(const Row* keys, int stride, int size, const Row* query, Row* result) {
        Row total[Block] = {};
        for (int start = 0; start < size; start += run) {
            const int end = size - start < run ? size : start + run;
            Row sum[Block] = {};
            for (int i = start; i < end; ++i) {
                const Row q = query[i];
                for (int n = 0; n < Block; ++n) add_product(keys[n * stride + i], q, sum[n]);
            }
            for (int n = 0; n < Block; ++n) add(sum[n], total[n]);
        }
        for (int n = 0; n < Block; ++n) result[n] = total[n];
    }

    // The sum of term(0) .. term(size - 1).
    template <class Term>
    static FASTWEIGHTS_INLINE Row sum_of(int size, Term term) {
        Row total = {};
        for (int start = 0; start < size; start += run) {
            const int end = size - start < run ? size : start + run;
            Row sum = {};
            for (int i = start; i < end; ++i) add(term(i), sum);
            add(sum, total);
        }
        return total;
    }

    static FASTWEIGHTS_INLINE void add(const Row& x, Row& y) {
        y.a += x.a;
        y.b += x.b;
    }
    static FASTWEIGHTS_INLINE void add_product(const Row& x, const Row& y, Row& z) {
        z.a += x.a * y.a;
        z.b += x.b * y.b;
    }

    // result[i] += sum over n of weight[n] keys[n][i].
    static FASTWEIGHTS_INLINE void mix(const Row* keys, int count, int stride, int size, const Row* weight,
                                       Row* result) {
        int i = 0;
        for (; i + 4 <= size; i += 4) mix_block<4>(keys + i, count, stride, weight, result + i);
        for (; i < size; ++i) mix_block<1>(keys + i, count, stride, weight, result + i);
    }

    template <int Block>
    static FASTWEIGHTS_INLINE void mix_block(const Row* keys, int count, int stride, const Row* weight, Row* result) {
        for (int start = 0; start < count; start += run) {
            const int end = count - start < run ? count : start + run;
            Row sum[Block] = {};
            for (int n = start; n < end; ++n) {
                const Row w = weight[n];
                const Row* key = keys + std::int64_t(n) * stride;
                for (int i = 0; i < Block; ++i) add_product(key[i], w, sum[i]);
            }
            for (int i = 0; i < Block; ++i) add(sum[i], result[i]);
        }
    }

    // y += M x for a size x size matrix M, packed in panels of `tile` rows, column by column, the last panel filled with
    // zeros; y has rows up to the next multiple of `tile`.
    static FASTWEIGHTS_INLINE void multiply(const T* packed, int size, const Row* x, Row* y) {
        for (int panel = 0; panel < size; panel += tile) {
            for (int start = 0; start < size; start += run) {
                const int end = size - start < run ? size : start + run;
                Row sum[tile] = {};
                for (int j = start; j < end; ++j, packed += tile) {
                    const Row v = x[j];
                    for (int r = 0; r < tile; ++r) {
                        sum[r].a += packed[r] * v.a;
                        sum[r].b += packed[r] * v.b;
                    }
                }
                for (int r = 0; r < tile; ++r) add(sum[r], y[panel + r]);
            }
        }
    }

    static FASTWEIGHTS_INLINE T sum(V v) {
        T total = 0;
        for (int lane = 0; lane < width; ++lane) total += v[lane];
        return total;
    }

    // result[i, j] += sum over n and over the chunk's sequences of x[n][i] y[n][j].
    static FASTWEIGHTS_INLINE void outer(const Row* x, const Row* y, int count, int stride, int size, T* result) {
        constexpr int block = 4;  // block^2 sums and 2 block operands in registers
        for (int i0 = 0; i0 < size; i0 += block) {
            const int rows = size - i0 < block ? size - i0 : block;
            for (int j0 = 0; j0 < size; j0 += block) {
                const int columns = size - j0 < block ? size - j0 : block;
                V sums[block][block] = {};
                // The rows past `size` exist (every vector is padded) and are dropped below.
                for (int n = 0; n < count; ++n) {
                    const Row* p = x + std::int64_t(n) * stride + i0;
                    const Row* q = y + std::int64_t(n) * stride + j0;
                    for (int i = 0; i < block; ++i)
                        for (int j = 0; j < block; ++j) sums[i][j] += p[i].a * q[j].a + p[i].b * q[j].b;
                }
                for (int i = 0; i < rows; ++i)
                    for (int j = 0; j < columns; ++j)
                        result[std::int64_t(i0 + i) * size + j0 + j] += sum(sums[i][j]);
            }
        }
    }
};

}  // namespace fastweights
