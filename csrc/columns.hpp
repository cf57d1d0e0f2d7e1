// The vectors of one sequence, H numbers each, along the lanes of registers.
//
// A vector takes `pitch` numbers: H and zeros up to whole registers. A matrix is its columns, one after the other.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "registers.hpp"

namespace fastweights {

constexpr int most_in_team = 4;  // vectors that share what is loaded of a matrix: more would not fit into the registers

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

    // The first `count` lanes: whole where they all are wanted, and else in pieces of which the compiler knows the size.
    static FASTWEIGHTS_INLINE void store_head(V v, int count, T* to) {
        if (count >= width) return store(v, to);
        T lanes[width];
        store(v, lanes);
        store_pieces<width / 2>(lanes, count, to);
    }

    // Asks for numbers that will soon be read or written: rows of other steps lie too far apart for the processor to foresee.
    static FASTWEIGHTS_INLINE void prefetch(const T* from, int size) {
        constexpr int line = 64 / static_cast<int>(sizeof(T));
        for (int i = 0; i < size; i += line) __builtin_prefetch(from + i);
        if (size > 0) __builtin_prefetch(from + size - 1);
    }

    // y[i] <- f(i) for whole registers; f takes the place of the first of the register's numbers.
    template <class Function>
    static FASTWEIGHTS_INLINE void fill(int pitch, T* y, Function f) {
        for (int i = 0; i < pitch; i += width) store(f(i), y + i);
    }

    // body(i, block): panels of up to Most registers, their number a constant to the compiler.
    template <int Most = 4, class Body>
    static FASTWEIGHTS_INLINE void for_panels(int pitch, Body body, int i = 0) {
        for (; i + Most * width <= pitch; i += Most * width) body(i, std::integral_constant<int, Most>{});
        if constexpr (Most > 1) for_panels<Most - 1>(pitch, body, i);
    }

    // body(i, block, count): the same for rows of any length, without a number past their end; `count` numbers are in each
    // register. The last register is stepped back, and takes some columns twice.
    template <int Most, class Body>
    static FASTWEIGHTS_INLINE void for_columns(int columns, Body body) {
        const std::integral_constant<int, 1> one;
        const std::integral_constant<int, width> whole;
        const int rest = columns % width;
        for_panels<Most>(columns - rest, [&](int i, auto block) FASTWEIGHTS_INLINE_LAMBDA { body(i, block, whole); });
        if (rest && columns > width) body(columns - width, one, whole);
        else if (rest) body(0, one, columns);
    }

    // y[n] += scale M x[n] for Count vectors, which share what is loaded of M. Even and odd columns are summed apart: one
    // sum would wait for each addition before the next.
    template <int Count, int Most>
    static FASTWEIGHTS_INLINE void multiply(const T* matrix, const T* const* x, int columns, int pitch, T scale,
                                            T* const* y) {
        for_panels<Most>(pitch, [&](int i, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            V even[Count][block] = {}, odd[Count][block] = {};
            const auto add = [&](int j, auto& sum) FASTWEIGHTS_INLINE_LAMBDA {
                V column[decltype(block)::value];
                for (int k = 0; k < block; ++k) column[k] = load(matrix + std::int64_t(j) * pitch + i + k * width);
                for (int n = 0; n < Count; ++n)
                    for (int k = 0; k < block; ++k) sum[n][k] += column[k] * x[n][j];
            };
            int j = 0;
            for (; j + 1 < columns; j += 2) {
                add(j, even);
                add(j + 1, odd);
            }
            if (j < columns) add(j, even);
            for (int n = 0; n < Count; ++n)
                for (int k = 0; k < block; ++k) {
                    T* const at = y[n] + i + k * width;
                    store(load(at) + (even[n][k] + odd[n][k]) * scale, at);
                }
        });
    }

    // y += scale M x.
    static FASTWEIGHTS_OUTLINE void multiply(const T* matrix, const T* x, int columns, int pitch, T scale, T* y) {
        multiply<1, 4>(matrix, &x, columns, pitch, scale, &y);
    }

    // y += scale M x for the rows of M, padded as x is.
    static FASTWEIGHTS_OUTLINE void multiply_rows(const T* matrix, const T* x, int rows, int pitch, T scale, T* y) {
        for (int i = 0; i < rows; i += width) {
            const int some = rows - i < width ? rows - i : width;
            V sum[width] = {};
            for (int k = 0; k < some; ++k)
                for (int j = 0; j < pitch; j += width)
                    sum[k] += load(matrix + std::int64_t(i + k) * pitch + j) * load(x + j);
            store(load(y + i) + R::sums_of(sum) * scale, y + i);
        }
    }

    // y[n] += M x[n] for up to `most_in_team` vectors.
    static FASTWEIGHTS_OUTLINE void multiply_each(const T* matrix, const T* const* x, int count, int columns, int pitch,
                                                  T* const* y) {
        if (count == most_in_team) return multiply<most_in_team, 2>(matrix, x, columns, pitch, T(1), y);
        for (int n = 0; n < count; ++n) multiply(matrix, x[n], columns, pitch, T(1), y[n]);
    }

    // M <- keep M + a b^T (column j: a b[j]).
    static FASTWEIGHTS_OUTLINE void write(T* matrix, T keep, const T* a, const T* b, int columns, int pitch) {
        for (int j = 0; j < columns; ++j)
            fill(pitch, matrix + std::int64_t(j) * pitch, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
                return load(matrix + std::int64_t(j) * pitch + i) * keep + load(a + i) * b[j];
            });
    }

    // M += sum over n of a[n] b[n]^T, row by row: the pitch of a, b and M is the same.
    static FASTWEIGHTS_OUTLINE void accumulate(T* matrix, const T* a, const T* b, int count, int rows, int pitch) {
        constexpr int tile = 4;
        for (int i0 = 0; i0 < rows; i0 += tile) {
            const int height = rows - i0 < tile ? rows - i0 : tile;
            for_panels(pitch, [&](int j, auto block) FASTWEIGHTS_INLINE_LAMBDA {
                V sum[tile][block] = {};
                for (int n = 0; n < count; ++n) {
                    // What lies past the last row is memory of the same arena, and is dropped below.
                    const T* const left = a + std::int64_t(n) * pitch + i0;
                    const T* const right = b + std::int64_t(n) * pitch + j;
                    for (int i = 0; i < tile; ++i)
                        for (int k = 0; k < block; ++k) sum[i][k] += load(right + k * width) * left[i];
                }
                for (int i = 0; i < height; ++i)
                    for (int k = 0; k < block; ++k) {
                        T* const at = matrix + std::int64_t(i0 + i) * pitch + j + k * width;
                        store(load(at) + sum[i][k], at);
                    }
            });
        }
    }

    // y += sum over n of weight[-n] key[n] (key[n] . x): attention to `count` keys, from the latest backwards in `weight`.
    static FASTWEIGHTS_INLINE void attend(const T* keys, const T* weight, int count, const T* x, int pitch, T* y) {
        constexpr int block = 4;
        for (int n = 0; n < count; n += block) {
            const int some = count - n < block ? count - n : block;
            const T* key[block];
            for (int k = 0; k < block; ++k) key[k] = keys + std::int64_t(k < some ? n + k : n) * pitch;
            V score[block] = {};
            for (int i = 0; i < pitch; i += width)
                for (int k = 0; k < block; ++k) score[k] += load(key[k] + i) * load(x + i);
            for (int k = 0; k < block; ++k) score[k] = k < some ? R::sum(score[k]) * weight[-n - k] : V{};
            for (int i = 0; i < pitch; i += width) {
                V sum = load(y + i);
                for (int k = 0; k < block; ++k) sum += load(key[k] + i) * score[k];
                store(sum, y + i);
            }
        }
    }

    // The sum of term(i) over the numbers of a vector, in every lane; whatever the padding gives is left out.
    template <class Term>
    static FASTWEIGHTS_INLINE V sum_of(int size, Term term) {
        V total = {};
        int i = 0;
        for (; i + width <= size; i += width) total += term(i);
        if (i < size) total += R::head(term(i), size - i);
        return R::sum(total);
    }

    // The columns of a rows x columns tensor, their padding zero.
    static FASTWEIGHTS_OUTLINE void load_columns(const T* source, int rows, int columns, T* target, int pitch) {
        for (int j = 0; j < columns; ++j) store(V{}, target + std::int64_t(j + 1) * pitch - width);
        transpose(source, columns, rows, columns, target, pitch);
    }
    static FASTWEIGHTS_OUTLINE void store_columns(const T* source, int rows, int columns, int pitch, T* target) {
        transpose(source, pitch, columns, rows, target, columns);
    }

    // target[j][i] <- source[i][j].
    static FASTWEIGHTS_OUTLINE void transpose(const T* source, std::int64_t source_pitch, int rows, int columns, T* target,
                                              std::int64_t target_pitch) {
        R::for_blocks(rows, [&](int i, int height) FASTWEIGHTS_INLINE_LAMBDA {
            R::for_blocks(columns, [&](int j, int across) FASTWEIGHTS_INLINE_LAMBDA {
                V block[width] = {};
                for (int k = 0; k < height; ++k)
                    std::memcpy(&block[k], source + (i + k) * source_pitch + j, across * sizeof(T));
                R::transpose(block);
                for (int k = 0; k < across; ++k)
                    std::memcpy(target + (j + k) * target_pitch + i, &block[k], height * sizeof(T));
            });
        });
    }

    // Of `size` numbers, whole registers where there are any.
    static FASTWEIGHTS_INLINE void copy(const T* from, int size, T* to) {
        R::for_blocks(size, [&](int i, int count) FASTWEIGHTS_INLINE_LAMBDA {
            std::memcpy(to + i, from + i, count * sizeof(T));
        });
    }

  private:
    template <int Piece>
    static FASTWEIGHTS_INLINE void store_pieces(const T* from, int count, T* to) {
        if constexpr (Piece > 0) {
            const int some = count & Piece;
            if (some) std::memcpy(to, from, Piece * sizeof(T));
            store_pieces<Piece / 2>(from + some, count, to + some);
        }
    }
};

}  // namespace fastweights
