// One head of one sequence of the delta family, in chunks: src/fastweights/ops/delta/reference.py is the definition.
//
// Within a chunk that begins with the state S, let G be the sums of the log decays, D_ij = exp(G_i - G_j) for j <= i,
// d_i = exp(G_i) and w_j = exp(G_last - G_j). What its steps write are the rows of U, and
//
//     (I + A) U = beta (V - d K S),   A_ij = beta_i D_ij k_i.k_j for j < i      (U = beta V by the additive rules)
//     O = scale (d Q S + P U),        P_ij = D_ij q_i.k_j for j <= i
//     S <- d_last S + (w K)^T U
//
// which is the WY form of Yang et al. 2024, "Parallelizing linear transformers with the delta rule".
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "arena.hpp"
#include "products.hpp"

namespace fastweights {

struct DeltaProblem {
    std::int64_t batch, steps, heads, keys, values;
    bool correct;
    double scale;
};

template <class T>
struct DeltaInputs {
    const T *q, *k, *v, *g, *beta, *state;  // g, beta and state: or null
    const std::int64_t* lengths;            // or null
};

template <class T>
struct DeltaResults {
    T *outputs, *final;
    T* trace;  // the state before each chunk, [B,H,chunks,K,V], or null
};

// Throws where a number is out of range; NaN is not.
template <class T>
void check_numbers(const DeltaProblem& p, const DeltaInputs<T>& in) {
    const auto any_outside = [](const auto* numbers, std::int64_t count, auto least, auto most) {
        bool any = false;
        for (std::int64_t i = 0; numbers && i < count; ++i) any |= (numbers[i] < least) | (numbers[i] > most);
        return any;
    };
    const std::int64_t steps = p.batch * p.steps * p.heads;
    if (any_outside(in.g, steps, -std::numeric_limits<T>::infinity(), T(0)) || any_outside(in.beta, steps, T(0), T(2)) ||
        any_outside(in.lengths, p.batch, std::int64_t(0), p.steps))
        throw std::domain_error("a decay, a rate or a length is out of range");
}

constexpr int delta_chunk = 64;

template <class T, int Bytes>
struct DeltaHead {
    using C = Columns<T, Bytes>;
    using R = typename C::R;
    using V = typename C::V;
    using M = Multiplier<T, Bytes>;
    using P = Product<T>;
    static constexpr int width = C::width;

    const DeltaProblem& p;
    const DeltaInputs<T>& in;
    const int keys, values;
    const std::int64_t key_pitch, value_pitch, step_pitch;
    std::int64_t first;   // the head's first step in a [B,T,H] tensor; the next is `p.heads` further on
    std::int64_t length;
    std::int64_t place;  // of the head in a [B,H] tensor
    Arena arena;

    T *q, *k, *scaled, *k_columns;     // [chunk,K], [chunk,K], w K, [K,chunk]
    T *value, *read, *written, *out;   // [chunk,V]: V - d K S, K S, U, and room for another
    T *decay, *attention, *overlap, *mixing;  // [chunk,chunk]: D, P, A without beta, A
    T* state;                          // [K,V]
    T kept[delta_chunk], left[delta_chunk], rate[delta_chunk];  // d, w, beta
    int cuts[delta_chunk + 1];         // where the parts of a chunk begin

    // Rows that lie a multiple of four lines apart would share few sets of the nearest cache.
    static std::int64_t pitch_of(std::int64_t size) { return (C::padded(size) + width) | width; }

    FASTWEIGHTS_INLINE DeltaHead(const DeltaProblem& problem, const DeltaInputs<T>& inputs,
                                 std::int64_t more_numbers = 0)
        : p(problem), in(inputs), keys(p.keys), values(p.values), key_pitch(pitch_of(p.keys)),
          value_pitch(pitch_of(p.values)), step_pitch(pitch_of(delta_chunk)),
          arena((3 * delta_chunk * key_pitch + keys * step_pitch + 4 * delta_chunk * value_pitch +
                 4 * delta_chunk * step_pitch + keys * value_pitch + more_numbers) *
                sizeof(T)) {
        q = take(delta_chunk, key_pitch);
        k = take(delta_chunk, key_pitch);
        scaled = take(delta_chunk, key_pitch);
        k_columns = take(keys, step_pitch);
        value = take(delta_chunk, value_pitch);
        read = take(delta_chunk, value_pitch);
        written = take(delta_chunk, value_pitch);
        out = take(delta_chunk, value_pitch);
        decay = take(delta_chunk, step_pitch);
        attention = take(delta_chunk, step_pitch);
        overlap = take(delta_chunk, step_pitch);
        mixing = take(delta_chunk, step_pitch);
        state = take(keys, value_pitch);
    }

    FASTWEIGHTS_INLINE void begin(std::int64_t b, std::int64_t h) {
        first = b * p.steps * p.heads + h;
        place = b * p.heads + h;
        length = in.lengths ? in.lengths[b] : p.steps;
    }

    FASTWEIGHTS_INLINE void forward(const DeltaResults<T>& results) {
        load_matrix(in.state ? in.state + place * keys * values : nullptr, state);
        const std::int64_t chunks = (p.steps + delta_chunk - 1) / delta_chunk;
        for (std::int64_t c = 0, t = 0; t < length; ++c, t += delta_chunk) {
            if (results.trace) store_state(state, results.trace + (place * chunks + c) * keys * values);
            const int parts = cut(t);
            for (int part = 0; part < parts; ++part) {
                const std::int64_t from = t + cuts[part];
                const int count = cuts[part + 1] - cuts[part];
                if (anew(from)) clear(state, keys, value_pitch);
                prepare(from, count);
                product(count, values, keys, q, key_pitch, 1, state, out);
                scale_rows(out, count, value_pitch, kept);
                lower(count, values, attention, written, value_pitch, out, value_pitch);
                for (int i = 0; i < count; ++i)
                    for (int j = 0; j < values; ++j) out[i * value_pitch + j] *= T(p.scale);
                store_rows(out, value_pitch, count, values, results.outputs, from);
                weigh_keys(count);
                scale_all(state, keys, value_pitch, kept[count - 1]);
                product(keys, values, count, scaled, 1, key_pitch, written, state, true);
            }
        }
        clear_past(results.outputs, values);
        store_state(state, results.final + place * keys * values);
    }

    // The parts of the chunk that begins with step t: each begins there or anew.
    FASTWEIGHTS_OUTLINE int cut(std::int64_t t) {
        const int count = static_cast<int>(std::min<std::int64_t>(delta_chunk, length - t));
        int parts = 0;
        for (int i = 0; i < count; ++i)
            if (i == 0 || anew(t + i)) cuts[parts++] = i;
        cuts[parts] = count;
        return parts;
    }
    FASTWEIGHTS_INLINE bool anew(std::int64_t t) const { return in.g && at(in.g, t) < -most(); }
    static constexpr T most() { return std::numeric_limits<T>::max(); }
    FASTWEIGHTS_INLINE T at(const T* numbers, std::int64_t t) const { return numbers[first + t * p.heads]; }

    // All that the outputs, the next state and the gradients of a part are made of.
    FASTWEIGHTS_OUTLINE void prepare(std::int64_t t, int count) {
        load_rows(in.q, keys, t, count, q, key_pitch);
        load_rows(in.k, keys, t, count, k, key_pitch);
        load_rows(in.v, values, t, count, value, value_pitch);
        C::transpose(k, key_pitch, count, keys, k_columns, step_pitch);
        // In float64: differences of large sums are what counts.
        double sums[delta_chunk], sum = 0;
        for (int i = 0; i < count; ++i) {
            if (in.g && !(i == 0 && anew(t))) sum += at(in.g, t + i);
            sums[i] = sum;
            rate[i] = in.beta ? at(in.beta, t + i) : T(1);
        }
        for (int i = 0; i < count; ++i) {
            kept[i] = T(std::exp(sums[i]));
            left[i] = T(std::exp(sum - sums[i]));
        }
        const int across = static_cast<int>(C::padded(count));
        product(count, across, keys, q, key_pitch, 1, k_columns, step_pitch, attention, step_pitch);
        if (p.correct) product(count, across, keys, k, key_pitch, 1, k_columns, step_pitch, overlap, step_pitch);
        for (int i = 0; i < count; ++i) {
            T* const d = decay + i * step_pitch;
            for (int j = 0; j < across; ++j) d[j] = j <= i ? T(sums[i] - sums[j]) : T(0);
            if (in.g) C::fill(across, d, [&](int j) FASTWEIGHTS_INLINE_LAMBDA { return R::exp(C::load(d + j)); });
            T* const s = attention + i * step_pitch;
            for (int j = 0; j < across; ++j) {
                d[j] = j <= i ? (in.g ? d[j] : T(1)) : T(0);
                s[j] = j <= i ? s[j] * d[j] : T(0);
            }
            if (!p.correct) continue;
            T* const o = overlap + i * step_pitch;
            T* const m = mixing + i * step_pitch;
            for (int j = 0; j < across; ++j) {
                o[j] = j < i ? o[j] * d[j] : T(0);
                m[j] = j < i ? o[j] * rate[i] : T(0);
            }
        }
        if (p.correct) product(count, values, keys, k, key_pitch, 1, state, read);
        for (int i = 0; i < count; ++i) {
            T* const v = value + i * value_pitch;
            const T* const r = read + i * value_pitch;
            T* const u = written + i * value_pitch;
            for (int j = 0; j < values; ++j) {
                if (p.correct) v[j] -= kept[i] * r[j];
                u[j] = rate[i] * v[j];
            }
        }
        if (p.correct)
            M::run({P::solve, count, padded(values), 0, mixing, step_pitch, 1, nullptr, 0, written, value_pitch,
                    true});
    }

    FASTWEIGHTS_OUTLINE void weigh_keys(int count) {
        for (int i = 0; i < count; ++i)
            for (int j = 0; j < keys; ++j) scaled[i * key_pitch + j] = left[i] * k[i * key_pitch + j];
    }

    // y <- a b, [rows,inner] [inner,columns]; by default b and y have rows of values.
    FASTWEIGHTS_INLINE void product(int rows, int columns, int inner, const T* a, std::int64_t a_row,
                                    std::int64_t a_column, const T* b, std::int64_t b_pitch, T* y, std::int64_t y_pitch,
                                    bool add = false) const {
        M::run({P::whole, rows, padded(columns), inner, a, a_row, a_column, b, b_pitch, y, y_pitch, add});
    }
    FASTWEIGHTS_INLINE void product(int rows, int columns, int inner, const T* a, std::int64_t a_row,
                                    std::int64_t a_column, const T* b, T* y, bool add = false) const {
        product(rows, columns, inner, a, a_row, a_column, b, value_pitch, y, value_pitch, add);
    }
    // y += a b for a lower triangular matrix of the part's steps.
    FASTWEIGHTS_INLINE void lower(int count, int columns, const T* a, const T* b, std::int64_t b_pitch, T* y,
                                  std::int64_t y_pitch) const {
        M::run({P::lower, count, padded(columns), 0, a, step_pitch, 1, b, b_pitch, y, y_pitch, true});
    }

    FASTWEIGHTS_INLINE T* take(std::int64_t rows, std::int64_t pitch) {
        return arena.template take_zeroed<T>(rows * pitch);
    }
    static FASTWEIGHTS_INLINE int padded(int size) { return static_cast<int>(C::padded(size)); }
    static FASTWEIGHTS_INLINE void clear(T* rows, int count, std::int64_t pitch) {
        std::fill_n(rows, count * pitch, T(0));
    }
    static FASTWEIGHTS_OUTLINE void scale_all(T* rows, int count, std::int64_t pitch, T factor) {
        for (std::int64_t i = 0; i < count * pitch; ++i) rows[i] *= factor;
    }
    static FASTWEIGHTS_OUTLINE void scale_rows(T* rows, int count, std::int64_t pitch, const T* factors) {
        for (int i = 0; i < count; ++i)
            for (std::int64_t j = 0; j < pitch; ++j) rows[i * pitch + j] *= factors[i];
    }

    FASTWEIGHTS_OUTLINE void load_rows(const T* from, int size, std::int64_t t, int count, T* to,
                                       std::int64_t pitch) const {
        for (int i = 0; i < count; ++i) C::copy(from + (first + (t + i) * p.heads) * size, size, to + i * pitch);
    }
    FASTWEIGHTS_OUTLINE void store_rows(const T* from, std::int64_t pitch, int count, int size, T* to,
                                        std::int64_t t) const {
        for (int i = 0; i < count; ++i) C::copy(from + i * pitch, size, to + (first + (t + i) * p.heads) * size);
    }
    FASTWEIGHTS_INLINE void clear_past(T* to, int size) const {
        for (std::int64_t t = length; t < p.steps; ++t) std::fill_n(to + (first + t * p.heads) * size, size, T(0));
    }
    FASTWEIGHTS_OUTLINE void load_matrix(const T* from, T* to) const {
        if (!from) return clear(to, keys, value_pitch);
        for (int i = 0; i < keys; ++i) C::copy(from + i * values, values, to + i * value_pitch);
    }
    FASTWEIGHTS_OUTLINE void store_state(const T* from, T* to) const {
        for (int i = 0; i < keys; ++i) C::copy(from + i * value_pitch, values, to + i * values);
    }
};

// One step, whose output is read from the state before it: the state passes twice, in rows as long as registers allow.
//
//     u = beta (v - d S^T k),   o = scale (d S^T q + (k.q) u),   S <- d S + k u^T
template <class T, int Bytes>
struct DeltaStep {
    using C = Columns<T, Bytes>;
    using V = typename C::V;
    static constexpr int width = C::width;
    static constexpr int most = Bytes == 64 ? 8 : 4;  // two sums for each register of a row

    static FASTWEIGHTS_OUTLINE void run(const DeltaProblem& p, const DeltaInputs<T>& in, std::int64_t place,
                                        const DeltaResults<T>& results) {
        const std::int64_t keys = p.keys, values = p.values;
        const T* const before = in.state ? in.state + place * keys * values : nullptr;
        const T *const q = in.q + place * keys, *const k = in.k + place * keys, *const v = in.v + place * values;
        T *const after = results.final + place * keys * values, *const out = results.outputs + place * values;
        if (in.lengths && in.lengths[place / p.heads] == 0) {
            std::fill_n(out, values, T(0));
            if (before) std::copy_n(before, keys * values, after);
            else std::fill_n(after, keys * values, T(0));
            return;
        }
        const bool anew = !before || (in.g && in.g[place] < -std::numeric_limits<T>::max());
        const T kept = in.g && !anew ? T(std::exp(double(in.g[place]))) : T(1), rate = in.beta ? in.beta[place] : T(1);
        const T scale = T(p.scale);
        T overlap = 0;
        for (std::int64_t i = 0; i < keys; ++i) overlap += k[i] * q[i];

        // `count` numbers of each of a panel's registers.
        const auto run_panel = [&](int j, auto block, auto count) FASTWEIGHTS_INLINE_LAMBDA {
            constexpr int size = decltype(block)::value;
            const auto load = [&](const T* from, int c) FASTWEIGHTS_INLINE_LAMBDA {
                V x = {};
                std::memcpy(&x, from + j + c * width, count * sizeof(T));
                return x;
            };
            const auto store = [&](V x, T* to, int c) FASTWEIGHTS_INLINE_LAMBDA {
                std::memcpy(to + j + c * width, &x, count * sizeof(T));
            };
            V by_key[size] = {}, by_query[size] = {}, written[size];
            if (!anew)
                for (std::int64_t i = 0; i < keys; ++i)
                    for (int c = 0; c < size; ++c) {
                        const V row = load(before + i * values, c);
                        by_key[c] += row * k[i];
                        by_query[c] += row * q[i];
                    }
            for (int c = 0; c < size; ++c) {
                written[c] = load(v, c);
                if (p.correct) written[c] -= by_key[c] * kept;
                written[c] *= rate;
                store((by_query[c] * kept + written[c] * overlap) * scale, out, c);
            }
            // From the last row on, which the nearest cache still has.
            for (std::int64_t i = keys - 1; i >= 0; --i)
                for (int c = 0; c < size; ++c) {
                    V row = written[c] * k[i];
                    if (!anew) row += load(before + i * values, c) * kept;
                    store(row, after + i * values, c);
                }
        };
        const std::integral_constant<int, 1> one;
        const std::integral_constant<int, width> whole;
        const auto run_whole = [&](int j, auto block) FASTWEIGHTS_INLINE_LAMBDA { run_panel(j, block, whole); };
        const int all = static_cast<int>(values), rest = all % width;
        C::template for_panels<most>(all - rest, run_whole);
        // The last register is stepped back, and takes some columns twice.
        if (rest && all > width) run_panel(all - width, one, whole);
        else if (rest) run_panel(0, one, all);
    }
};

}  // namespace fastweights
