// The pairs of steps of a chunk where every channel of the keys decays by itself.
//
// With d_i the factors of step i, a key that was written at step j is x_j = d_i ... d_{j+1} k_j when step i reads it, channel
// by channel. It is made by going on from one step to the next: a product of factors between 0 and 1 can only become small,
// where exp(G_i) exp(-G_j), of sums of logs, leaves the numbers that there are.
#pragma once

#include <algorithm>

#include "columns.hpp"

namespace fastweights {

template <class T, int Bytes>
struct ChannelPairs {
    using C = Columns<T, Bytes>;
    using R = typename C::R;
    using V = typename C::V;
    static constexpr int width = C::width;
    static constexpr int block = 2;                      // registers, of keys or of channels
    static constexpr int readers = Bytes == 64 ? 4 : 2;  // steps that read a block of keys, as many as are held at once
    static constexpr int group = 4;                      // keys, for each a block of channels

    // Of [chunk,K], rows of `pitch`, which is a register longer than a row at least; of a gradient, the same.
    struct Rows {
        T *q, *a, *k;  // two that read keys, and the keys
        bool own;      // `a` reads the key of its own step too, as q does
    };
    struct Steps {
        Rows rows;
        T* factors;
        std::int64_t pitch;
        int count, keys;

        // Steps that do nothing, up to whole groups: one form of the loops below is enough.
        FASTWEIGHTS_OUTLINE Steps(const Rows& of_steps, T* factor_rows, std::int64_t row_pitch, int steps, int channels)
            : rows(of_steps), factors(factor_rows), pitch(row_pitch), count(round_up(steps, group)), keys(channels) {
            for (T* each : {rows.q, rows.a, rows.k}) std::fill(each + steps * pitch, each + count * pitch, T(0));
            std::fill(factors + steps * pitch, factors + count * pitch, T(1));
        }
    };
    static constexpr int round_up(int size, int step) { return (size + step - 1) / step * step; }

    // attention_ij <- q_i . x_j for j <= i, overlap_ij <- a_i . x_j for j < i, or j <= i, zero elsewhere, [chunk,chunk].
    // `columns`, [K,chunk], holds the keys, and in the end what is left of each after the last step.
    static FASTWEIGHTS_OUTLINE void multiply(const Steps& s, T* columns, T* attention, T* overlap, std::int64_t pitch) {
        for (int j = 0; j < s.count; j += block * width) {
            for (int i = 0; i < j; ++i)
                for (int n = 0; n < block * width; ++n) attention[i * pitch + j + n] = overlap[i * pitch + j + n] = 0;
            int i = j;
            for (; i < s.count && i < j + block * width; i += readers)
                read<true>(s, i, j, columns, attention, overlap, pitch);
            for (; i < s.count; i += readers) read<false>(s, i, j, columns, attention, overlap, pitch);
        }
    }

    // Adds to the gradients of the rows and of the logs of the factors, [chunk,K], what they have by those of the attention
    // and the overlap, which must be zero for a key of the reader's own step that is not read, and for the steps past the
    // last one. `room` holds room_of() numbers.
    static FASTWEIGHTS_OUTLINE void differentiate(const Steps& s, const T* attention, const T* overlap,
                                                  std::int64_t pitch, T* room, const Rows& grads, T* grad_g) {
        for (int c = 0; c < s.keys; c += block * width)
            for (int j = 0; j < s.count; j += group)
                differentiate_keys(s, j, c, attention, overlap, pitch, room, grads, grad_g);
    }
    static constexpr std::int64_t room_of(int chunk) { return std::int64_t(chunk) * group * block * width; }

  private:
    // For the steps from i on that read a block of keys from j on; Within: some of the keys are theirs.
    template <bool Within>
    static FASTWEIGHTS_INLINE void read(const Steps& s, int i, int j, T* columns, T* attention, T* overlap,
                                        std::int64_t pitch) {
        V by_q[readers][block] = {}, by_a[readers][block] = {};
        const T *q = s.rows.q + i * s.pitch, *a = s.rows.a + i * s.pitch, *factors = s.factors + i * s.pitch;
        T* column = columns + j;
        for (int c = 0; c < s.keys; ++c, column += pitch) {
            V x[block];
#pragma GCC unroll 8
            for (int n = 0; n < block; ++n) x[n] = C::load(column + n * width);
#pragma GCC unroll 8
            for (int r = 0; r < readers; ++r)
#pragma GCC unroll 8
                for (int n = 0; n < block; ++n) {
                    const V decayed = x[n] * factors[r * s.pitch + c];
                    x[n] = Within ? R::select(decayed, x[n], i + r - j - n * width) : decayed;
                    by_q[r][n] += x[n] * q[r * s.pitch + c];
                    by_a[r][n] += x[n] * a[r * s.pitch + c];
                }
#pragma GCC unroll 8
            for (int n = 0; n < block; ++n) C::store(x[n], column + n * width);
        }
        for (int r = 0; r < readers; ++r)
            for (int n = 0; n < block; ++n) {
                const std::int64_t place = (i + r) * pitch + j + n * width;
                const int earlier = i + r - j - n * width;
                C::store(Within ? R::head(by_q[r][n], earlier + 1) : by_q[r][n], attention + place);
                C::store(Within ? R::head(by_a[r][n], earlier + s.rows.own) : by_a[r][n], overlap + place);
            }
    }

    // For a group of keys from j on and a block of channels from c on: forwards through the steps that read them, then back,
    // with what x_j was at each step and what its gradient is.
    static FASTWEIGHTS_INLINE void differentiate_keys(const Steps& s, int j, int c, const T* attention, const T* overlap,
                                                      std::int64_t pitch, T* room, const Rows& grads, T* grad_g) {
        const auto at = [&](auto* rows, int i, int n) FASTWEIGHTS_INLINE_LAMBDA { return rows + i * s.pitch + c + n * width; };
        const auto place = [&](int i, int r, int n) FASTWEIGHTS_INLINE_LAMBDA {
            return room + (((i - j) * group + r) * block + n) * width;
        };
        V x[group][block];
#pragma GCC unroll 8
        for (int r = 0; r < group; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < block; ++n) x[r][n] = C::load(at(s.rows.k, j + r, n));
        // Some: the first keys that step i has, all of them from j + group on.
        const auto forwards = [&](int i, auto some) FASTWEIGHTS_INLINE_LAMBDA {
#pragma GCC unroll 8
            for (int n = 0; n < block; ++n) {
                const V factor = C::load(at(s.factors, i, n));
                V of_q = C::load(at(grads.q, i, n)), of_a = C::load(at(grads.a, i, n));
#pragma GCC unroll 8
                for (int r = 0; r < group; ++r) {
                    if (r >= some) break;
                    if (i != j + r) x[r][n] *= factor;
                    C::store(x[r][n], place(i, r, n));
                    of_q += x[r][n] * attention[i * pitch + j + r];
                    of_a += x[r][n] * overlap[i * pitch + j + r];
                }
                C::store(of_q, at(grads.q, i, n));
                C::store(of_a, at(grads.a, i, n));
            }
        };
        V y[group][block] = {};  // of x
        const auto backwards = [&](int i, auto some) FASTWEIGHTS_INLINE_LAMBDA {
#pragma GCC unroll 8
            for (int n = 0; n < block; ++n) {
                const V factor = C::load(at(s.factors, i, n)), q = C::load(at(s.rows.q, i, n)), a = C::load(at(s.rows.a, i, n));
                V of_g = C::load(at(grad_g, i, n));
#pragma GCC unroll 8
                for (int r = 0; r < group; ++r) {
                    if (r >= some) break;
                    y[r][n] += q * attention[i * pitch + j + r] + a * overlap[i * pitch + j + r];
                    if (i == j + r) continue;
                    of_g += C::load(place(i, r, n)) * y[r][n];
                    y[r][n] *= factor;
                }
                C::store(of_g, at(grad_g, i, n));
            }
        };
        constexpr std::integral_constant<int, group> all;
        for_each<group>([&](auto r) FASTWEIGHTS_INLINE_LAMBDA {
            forwards(j + r, std::integral_constant<int, r + 1>{});
        });
        for (int i = j + group; i < s.count; ++i) forwards(i, all);
        for (int i = s.count - 1; i >= j + group; --i) backwards(i, all);
        for_each<group>([&](auto r) FASTWEIGHTS_INLINE_LAMBDA {
            constexpr int last = group - 1 - r;
            backwards(j + last, std::integral_constant<int, last + 1>{});
        });
#pragma GCC unroll 8
        for (int r = 0; r < group; ++r)
#pragma GCC unroll 8
            for (int n = 0; n < block; ++n) C::store(C::load(at(grads.k, j + r, n)) + y[r][n], at(grads.k, j + r, n));
    }

    // body(0) .. body(Count - 1), each a constant to the compiler.
    template <int Count, class Body>
    static FASTWEIGHTS_INLINE void for_each(Body body) {
        if constexpr (Count > 0) {
            for_each<Count - 1>(body);
            body(std::integral_constant<int, Count - 1>{});
        }
    }
};

}  // namespace fastweights
