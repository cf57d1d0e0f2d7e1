// One head of one sequence of the delta family, in chunks: src/fastweights/ops/delta/reference.py is the definition.
//
// Within a chunk that begins with the state S, let G be the sums of the log decays, D_ij = exp(G_i - G_j) for j <= i,
// d_i = exp(G_i) and w_j = exp(G_last - G_j). What its steps write are the rows of U, and
//
//     (I + A) U = beta (V - d K S),   A_ij = beta_i D_ij k_i.k_j for j < i      (U = beta V by the additive rules)
//     O = scale (d Q S + P U),        P_ij = D_ij q_i.k_j for j <= i       (+ skip V, by the additive rules)
//     S <- d_last S + (w K)^T U
//
// which is the WY form of Yang et al. 2024, "Parallelizing linear transformers with the delta rule". Where every channel of
// the keys decays by itself, d and w are a row for each step, and D is within the sums: P_ij = q_i.(exp(G_i - G_j) k_j).
// Diagonal plus a matrix of rank one: dplr.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "arena.hpp"
#include "channel_pairs.hpp"
#include "packed.hpp"
#include "products.hpp"

namespace fastweights {

struct DeltaProblem {
    std::int64_t batch, steps, heads, keys, values;  // of packed sequences, `batch` of them are in one row of `steps`
    std::int64_t key_heads;                          // of q and k, each for as many heads of v, g and beta
    bool correct, channels;  // channels: g is [B,T,H,K]
    double scale;
};

template <class T>
struct DeltaInputs {
    const T *q, *k, *v, *g, *beta;          // g and beta: or null
    const T *a, *b;                         // of matrices of rank one, or null; g has channels where they are
    const T* skip;                          // [H], of an additive rule, or null: what each output has of its own value
    const T *state;                         // or null
    const std::int64_t *lengths, *bounds;   // or null; bounds: where packed sequences begin, and the end of the last
};

template <class T>
struct DeltaResults {
    T *outputs, *final;
    T* trace;  // the state before each chunk of each sequence, [H,chunks,K,V], or null
};

constexpr int delta_chunk = 64;

// The heads of a head of q and k are parted into slices, each an item of work: what q and k have in common is computed once
// for all heads of a slice. A number of its own, so that sums over heads are the same on any number of threads;
// src/fastweights/ops/delta/cpu.py has the same.
constexpr std::int64_t most_delta_slices = 8;
inline std::int64_t count_slices(const DeltaProblem& p) { return std::min(p.heads / p.key_heads, most_delta_slices); }
inline std::int64_t most_in_slice(const DeltaProblem& p) {
    const std::int64_t slices = count_slices(p);
    return (p.heads / p.key_heads + slices - 1) / slices;
}

// Whether an item of the forward pass is a head, and not a slice of heads.
template <class T>
bool is_one_step(const DeltaProblem& p, const DeltaInputs<T>& in, const DeltaResults<T>& results) {
    return p.steps == 1 && !in.bounds && !results.trace;
}

// A head's chunks in a trace. Packed sequences leave some out: with each one before, another chunk may have begun.
inline std::int64_t count_chunks(const DeltaProblem& p, bool packed) {
    return packed ? p.steps / delta_chunk + p.batch : p.batch * ((p.steps + delta_chunk - 1) / delta_chunk);
}

// Throws where a number is out of range; NaN is not.
template <class T>
void check_numbers(const DeltaProblem& p, const DeltaInputs<T>& in) {
    const auto any_outside = [](const auto* numbers, std::int64_t count, auto least, auto most) {
        bool any = false;
        for (std::int64_t i = 0; numbers && i < count; ++i) any |= (numbers[i] < least) | (numbers[i] > most);
        return any;
    };
    const std::int64_t steps = (in.bounds ? 1 : p.batch) * p.steps * p.heads, decays = p.channels ? steps * p.keys : steps;
    const T* const rates = p.correct ? in.beta : nullptr;  // an additive rule takes any
    if (any_outside(in.g, decays, -std::numeric_limits<T>::infinity(), T(0)) ||
        any_outside(rates, steps, T(0), T(2)) || any_outside(in.lengths, p.batch, std::int64_t(0), p.steps))
        throw std::domain_error("a decay, a rate or a length is out of range");
    check_bounds(in.bounds, p.batch, p.steps);
}

// Whether the logs of a step's decays leave nothing of the state.
template <class T>
FASTWEIGHTS_INLINE bool is_nothing(const T* g, std::int64_t decays) {
    return std::all_of(g, g + decays, [](T decay) { return decay < -std::numeric_limits<T>::max(); });
}

// e^g, and zero where it would be less than a normal number.
template <class C, class V>
FASTWEIGHTS_INLINE V decay_of(V g) {
    using T = std::decay_t<decltype(g[0])>;
    return g < V{} + std::log(std::numeric_limits<T>::min()) ? V{} : C::R::exp(g);
}

template <class T, int Bytes>
struct DeltaHead {
    using C = Columns<T, Bytes>;
    using R = typename C::R;
    using V = typename C::V;
    using M = Multiplier<T, Bytes>;
    using P = Product<T>;
    using Pairs = ChannelPairs<T, Bytes>;
    static constexpr int width = C::width;

    const DeltaProblem& p;
    const DeltaInputs<T>& in;
    const int keys, values, decays;  // decays: numbers of g for each step
    const std::int64_t key_pitch, value_pitch, step_pitch;
    std::int64_t sequence, slice, from_head, end_head;  // the slice's heads
    std::int64_t first;      // the head's first step in a [B,T,H] tensor; the next is `p.heads` further on
    std::int64_t first_key;  // the same in one of as many heads as q and k have
    std::int64_t length, end;  // steps that count, and those that there are
    std::int64_t place;        // of the head in a [B,H] tensor
    std::int64_t first_chunk;  // of the head in a trace
    Arena arena;

    // Of a chunk, for all heads of the slice: [chunk,K], and q_i.k_j and k_i.k_j, [chunk,chunk].
    T *chunk_q, *chunk_k, *chunk_attention, *chunk_overlap;
    T *q, *k, *scaled, *k_columns;     // of a part of it, [chunk,K], [chunk,K], w K; [K,chunk]
    T *value, *read, *written, *out;   // [chunk,V]: V - d K S, K S, U, and room for another
    T *decay, *attention, *overlap, *mixing;  // [chunk,chunk]: D, P, A without beta, A
    T *states, *state;                 // [slice,K,V], and one of them
    T kept[delta_chunk], left[delta_chunk], rate[delta_chunk];  // d, w, beta
    // Where channels decay by themselves, [chunk,K]: the factors of each step, d, d Q and d K. `k_columns` ends as w K.
    T *factors, *kept_rows, *kept_q, *kept_k;
    // With matrices of rank one: a_i, b_i and what is kept of a_i, [chunk+1,K]; of the rows b and U what `k_columns`,
    // P and A are of k and V.
    T *a, *b, *kept_a, *b_columns, *b_attention, *b_overlap;
    int cuts[delta_chunk + 1];         // where the parts of a chunk begin

    // Rows that lie a multiple of four lines apart would share few sets of the nearest cache.
    static std::int64_t pitch_of(std::int64_t size) { return (C::padded(size) + width) | width; }

    FASTWEIGHTS_INLINE DeltaHead(const DeltaProblem& problem, const DeltaInputs<T>& inputs,
                                 std::int64_t more_numbers = 0)
        : p(problem), in(inputs), keys(p.keys), values(p.values), decays(p.channels ? p.keys : 1),
          key_pitch(pitch_of(p.keys)), value_pitch(pitch_of(p.values)), step_pitch(pitch_of(delta_chunk)),
          arena(((p.channels ? 7 : 3) * delta_chunk * key_pitch + keys * step_pitch + 4 * delta_chunk * value_pitch +
                 (6 * delta_chunk + 1) * step_pitch + most_in_slice(p) * keys * value_pitch + more_numbers +
                 (in.a ? 3 * (delta_chunk + 1) * key_pitch + (keys + 2 * delta_chunk + 1) * step_pitch : 0)) *
                sizeof(T)) {
        q = chunk_q = take(delta_chunk, key_pitch);
        k = chunk_k = take(delta_chunk, key_pitch);
        chunk_attention = take_raw(delta_chunk, step_pitch);
        chunk_overlap = take_raw(delta_chunk, step_pitch);
        scaled = take(delta_chunk, key_pitch);
        k_columns = take(keys, step_pitch);
        value = take(delta_chunk, value_pitch);
        read = take(delta_chunk, value_pitch);
        written = take(delta_chunk, value_pitch);
        out = take(delta_chunk, value_pitch);
        decay = take(delta_chunk, step_pitch);
        attention = take(delta_chunk, step_pitch);
        overlap = take(delta_chunk + 1, step_pitch);
        mixing = take(delta_chunk, step_pitch);
        states = take(most_in_slice(p) * keys, value_pitch);
        if (!p.channels) return;
        factors = take(delta_chunk, key_pitch);
        kept_rows = take(delta_chunk, key_pitch);
        kept_q = take(delta_chunk, key_pitch);
        kept_k = take(delta_chunk, key_pitch);
        if (!in.a) return;
        a = take(delta_chunk + 1, key_pitch);
        b = take(delta_chunk + 1, key_pitch);
        kept_a = take(delta_chunk + 1, key_pitch);
        b_columns = take(keys, step_pitch);
        b_attention = take(delta_chunk, step_pitch);
        b_overlap = take(delta_chunk + 1, step_pitch);
    }

    // Item: a slice of the heads of a head of q and k, of a sequence.
    FASTWEIGHTS_INLINE void begin_slice(std::int64_t item) {
        const std::int64_t slices = count_slices(p), group = p.heads / p.key_heads;
        const std::int64_t key_head = item / slices % p.key_heads;
        slice = item % slices;
        sequence = item / slices / p.key_heads;
        from_head = key_head * group + group * slice / slices;
        end_head = key_head * group + group * (slice + 1) / slices;
        begin_head(from_head);
    }
    FASTWEIGHTS_INLINE void begin_head(std::int64_t h) {
        const std::int64_t start = in.bounds ? in.bounds[sequence] : sequence * p.steps;
        first = start * p.heads + h;
        first_key = start * p.key_heads + h / (p.heads / p.key_heads);
        end = in.bounds ? in.bounds[sequence + 1] - start : p.steps;
        length = in.lengths ? in.lengths[sequence] : end;
        place = sequence * p.heads + h;
        const std::int64_t chunks = count_chunks(p, in.bounds);
        first_chunk = h * chunks + (in.bounds ? start / delta_chunk + sequence : chunks / p.batch * sequence);
        state = states + (h - from_head) * keys * value_pitch;
    }

    FASTWEIGHTS_INLINE void forward(std::int64_t item, const DeltaResults<T>& results) {
        begin_slice(item);
        for (std::int64_t h = from_head; h < end_head; ++h) {
            begin_head(h);
            load_matrix(in.state ? in.state + place * keys * values : nullptr, state);
        }
        for (std::int64_t t = 0; t < length; t += delta_chunk) {
            load_keys(t);
            for (std::int64_t h = from_head; h < end_head; ++h) {
                begin_head(h);
                forward_chunk(t, results);
            }
        }
        for (std::int64_t h = from_head; h < end_head; ++h) {
            begin_head(h);
            clear_past(results.outputs, values);
            store_state(state, results.final + place * keys * values);
        }
    }

    FASTWEIGHTS_OUTLINE void forward_chunk(std::int64_t t, const DeltaResults<T>& results) {
        if (results.trace) store_state(state, results.trace + (first_chunk + t / delta_chunk) * keys * values);
        const int parts = cut(t);
        for (int part = 0; part < parts; ++part) {
            const std::int64_t from = t + cuts[part];
            const int count = cuts[part + 1] - cuts[part];
            if (anew(from)) clear(state, keys, value_pitch);
            if (in.a) prepare_dplr(from, count);
            else prepare(from, count, cuts[part]);
            product(count, values, keys, p.channels ? kept_q : q, key_pitch, 1, state, out);
            if (!p.channels) scale_rows(out, count, value_pitch, kept);
            lower(count, values, in.a ? b_attention : attention, written, value_pitch, out, value_pitch);
            if (in.a) lower(count, values, attention, value, value_pitch, out, value_pitch);
            const T skip = in.skip ? in.skip[head()] : T(0);
            for (int i = 0; i < count; ++i) {
                T* const o = out + i * value_pitch;
                const T* const v = value + i * value_pitch;
                for (int j = 0; j < values; ++j) o[j] = in.skip ? T(p.scale) * o[j] + skip * v[j] : T(p.scale) * o[j];
            }
            store_rows(out, value_pitch, count, values, results.outputs, from);
            if (p.channels) {
                scale_rows(state, keys, value_pitch, kept_rows + (count - 1) * key_pitch);
                product(keys, values, count, in.a ? b_columns : k_columns, step_pitch, 1, written, state, true);
                if (in.a) product(keys, values, count, k_columns, step_pitch, 1, value, state, true);
            } else {
                weigh_keys(count);
                scale_all(state, keys, value_pitch, kept[count - 1]);
                product(keys, values, count, scaled, 1, key_pitch, written, state, true);
            }
        }
    }

    // What all heads of the slice have in common of the chunk that begins with step t.
    FASTWEIGHTS_OUTLINE void load_keys(std::int64_t t) {
        if (p.channels) return;  // decays come between q and k
        const int count = static_cast<int>(std::min<std::int64_t>(delta_chunk, length - t));
        load_key_rows(t, count);
        C::transpose(chunk_k, key_pitch, count, keys, k_columns, step_pitch);
        pair(count, keys, chunk_q, key_pitch, k_columns, chunk_attention);
        if (p.correct) pair(count, keys, chunk_k, key_pitch, k_columns, chunk_overlap);
    }
    FASTWEIGHTS_INLINE void load_key_rows(std::int64_t t, int count) const {
        load_rows(in.q + (first_key + t * p.key_heads) * keys, p.key_heads * keys, count, keys, chunk_q, key_pitch);
        load_rows(in.k + (first_key + t * p.key_heads) * keys, p.key_heads * keys, count, keys, chunk_k, key_pitch);
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
    FASTWEIGHTS_INLINE bool anew(std::int64_t t) const {
        return in.g && is_nothing(in.g + (first + t * p.heads) * decays, decays);
    }
    FASTWEIGHTS_INLINE std::int64_t head() const { return place % p.heads; }
    FASTWEIGHTS_INLINE T at(const T* numbers, std::int64_t t) const { return numbers[first + t * p.heads]; }

    // All that the outputs, the next state and the gradients are made of, of a part that begins with a row of the chunk.
    FASTWEIGHTS_OUTLINE void prepare(std::int64_t t, int count, int row) {
        load_rows(in.v, values, t, count, value, value_pitch);
        for (int i = 0; i < count; ++i) rate[i] = in.beta ? at(in.beta, t + i) : T(1);
        if (p.channels) pair_channels(t, count);
        else pair_steps(t, count, row);
        if (p.correct) product(count, values, keys, p.channels ? kept_k : k, key_pitch, 1, state, read);
        for (int i = 0; i < count; ++i) {
            T* const v = value + i * value_pitch;
            const T* const r = read + i * value_pitch;
            T* const u = written + i * value_pitch;
            for (int j = 0; j < values; ++j) {
                if (p.correct) v[j] -= (p.channels ? T(1) : kept[i]) * r[j];
                u[j] = rate[i] * v[j];
            }
        }
        if (p.correct)
            M::run({P::solve, count, padded(values), 0, mixing, step_pitch, 1, nullptr, 0, written, value_pitch,
                    true});
    }

    FASTWEIGHTS_OUTLINE void prepare_dplr(std::int64_t t, int count);  // the same: dplr.hpp

    // D, P and A, and what is kept and left of the state and the keys.
    FASTWEIGHTS_OUTLINE void pair_steps(std::int64_t t, int count, int row) {
        q = chunk_q + row * key_pitch;
        k = chunk_k + row * key_pitch;
        // In float64: differences of large sums are what counts.
        double sums[delta_chunk], sum = 0;
        // What leaves nothing need not leave less: a sum with the lowest number in it would hold none of the others.
        constexpr T least = sizeof(T) == 4 ? -110 : -750;
        for (int i = 0; i < count; ++i) {
            if (in.g && !(i == 0 && anew(t))) sum += at(in.g, t + i) < least ? least : at(in.g, t + i);
            sums[i] = sum;
        }
        for (int i = 0; i < count; ++i) {
            kept[i] = T(std::exp(sums[i]));
            left[i] = T(std::exp(sum - sums[i]));
        }
        for (int i = 0; i < count; ++i) {
            const int across = padded(i + 1);  // what is behind that is not read
            T* const d = decay + i * step_pitch;
            for (int j = 0; j < across; ++j) d[j] = j <= i ? T(sums[i] - sums[j]) : T(0);
            if (in.g) C::fill(across, d, [&](int j) FASTWEIGHTS_INLINE_LAMBDA { return R::exp(C::load(d + j)); });
            T* const s = attention + i * step_pitch;
            const std::int64_t place = (row + i) * step_pitch + row;  // `across` may pass the chunk's last step: rows are longer
            const T* const by_q = chunk_attention + place;
            for (int j = 0; j < across; ++j) {
                d[j] = j <= i ? (in.g ? d[j] : T(1)) : T(0);
                s[j] = j <= i ? by_q[j] * d[j] : T(0);
            }
            if (!p.correct) continue;
            const T* const by_k = chunk_overlap + place;
            T* const o = overlap + i * step_pitch;
            T* const m = mixing + i * step_pitch;
            for (int j = 0; j < across; ++j) {
                o[j] = j < i ? by_k[j] * d[j] : T(0);
                m[j] = j < i ? o[j] * rate[i] : T(0);
            }
        }
    }

    // The same where every channel decays by itself.
    FASTWEIGHTS_OUTLINE void pair_channels(std::int64_t t, int count) {
        load_key_rows(t, count);
        C::transpose(k, key_pitch, count, keys, k_columns, step_pitch);
        load_factors(t, count);
        const std::int64_t all = count * key_pitch;
        for (std::int64_t c = 0; c < all; ++c) kept_k[c] = kept_rows[c] * k[c];
        Pairs::multiply(steps_of(count), k_columns, attention, overlap, step_pitch);
        for (int i = 0; p.correct && i < count; ++i)
            for (int j = 0; j < i; ++j) mixing[i * step_pitch + j] = overlap[i * step_pitch + j] * rate[i];
    }
    FASTWEIGHTS_OUTLINE void load_factors(std::int64_t t, int count) {
        load_rows(in.g, keys, t, count, factors, key_pitch);
        if (anew(t)) std::fill_n(factors, keys, T(0));  // the state is zero: a part that begins anew keeps all of it
        const int across = padded(keys);
        for (int i = 0; i < count; ++i) {
            T* const factor = factors + i * key_pitch;
            T* const sofar = kept_rows + i * key_pitch;
            C::fill(across, factor, [&](int c) FASTWEIGHTS_INLINE_LAMBDA { return decay_of<C>(C::load(factor + c)); });
            for (int c = 0; c < across; ++c) {
                sofar[c] = i ? sofar[c - key_pitch] * factor[c] : factor[c];
                kept_q[i * key_pitch + c] = sofar[c] * q[i * key_pitch + c];
            }
        }
    }
    FASTWEIGHTS_INLINE typename Pairs::Steps steps_of(int count) const {
        return typename Pairs::Steps({q, k, k, false}, factors, key_pitch, count, keys);
    }
    // What step i + 1 reads before its decay is read after that of step i.
    FASTWEIGHTS_INLINE typename Pairs::Steps dplr_steps_of(int count, T* written_keys) const {
        return typename Pairs::Steps({q, a + key_pitch, written_keys, true}, factors, key_pitch, count, keys);
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
    // y <- a b for rows of steps and columns of the steps until each.
    FASTWEIGHTS_INLINE void pair(int count, int inner, const T* a, std::int64_t pitch, const T* b, T* y) const {
        M::run({P::whole, count, padded(count), inner, a, pitch, 1, b, step_pitch, y, step_pitch, false, true});
    }
    // y += a b for a lower triangular matrix of the part's steps.
    FASTWEIGHTS_INLINE void lower(int count, int columns, const T* a, const T* b, std::int64_t b_pitch, T* y,
                                  std::int64_t y_pitch) const {
        M::run({P::lower, count, padded(columns), 0, a, step_pitch, 1, b, b_pitch, y, y_pitch, true});
    }

    FASTWEIGHTS_INLINE T* take(std::int64_t rows, std::int64_t pitch) {
        return arena.template take_zeroed<T>(rows * pitch);
    }
    // Where nothing is read that was not written: zeros take as long as a short sequence.
    FASTWEIGHTS_INLINE T* take_raw(std::int64_t rows, std::int64_t pitch) {
        return arena.template take<T>(rows * pitch);
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

    static FASTWEIGHTS_OUTLINE void load_rows(const T* from, std::int64_t stride, int count, int size, T* to,
                                              std::int64_t pitch) {
        for (int i = 0; i < count; ++i) C::copy(from + i * stride, size, to + i * pitch);
    }
    FASTWEIGHTS_INLINE void load_rows(const T* from, int size, std::int64_t t, int count, T* to,
                                      std::int64_t pitch) const {
        load_rows(from + (first + t * p.heads) * size, p.heads * size, count, size, to, pitch);
    }
    FASTWEIGHTS_OUTLINE void store_rows(const T* from, std::int64_t pitch, int count, int size, T* to,
                                        std::int64_t t) const {
        for (int i = 0; i < count; ++i) C::copy(from + i * pitch, size, to + (first + (t + i) * p.heads) * size);
    }
    FASTWEIGHTS_INLINE void clear_past(T* to, int size) const {
        for (std::int64_t t = length; t < end; ++t) std::fill_n(to + (first + t * p.heads) * size, size, T(0));
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
//     u = beta (v - (d S)^T k),   o = scale ((d S)^T q + (k.q) u),   S <- d S + k u^T
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
        const std::int64_t key_place = place / (p.heads / p.key_heads);
        const T *const q = in.q + key_place * keys, *const k = in.k + key_place * keys, *const v = in.v + place * values;
        T *const after = results.final + place * keys * values, *const out = results.outputs + place * values;
        if (in.lengths && in.lengths[place / p.heads] == 0) {
            std::fill_n(out, values, T(0));
            if (before) std::copy_n(before, keys * values, after);
            else std::fill_n(after, keys * values, T(0));
            return;
        }
        const std::int64_t decays = p.channels ? keys : 1;
        const T* const g = in.g ? in.g + place * decays : nullptr;
        const bool anew = !before || (g && is_nothing(g, decays));
        const T rate = in.beta ? in.beta[place] : T(1), scale = T(p.scale);
        T overlap = 0;
        for (std::int64_t i = 0; i < keys; ++i) overlap += k[i] * q[i];
        // Of a decay for all channels, what is read; of one for each, the key and the query that read.
        const T kept = g && !anew && !p.channels ? T(std::exp(double(*g))) : T(1);
        Arena arena(p.channels ? 3 * C::padded(keys) * sizeof(T) : 0);
        const T *by_channel = &kept, *reading_k = k, *reading_q = q;
        if (p.channels && !anew) {
            T* const rows[] = {arena.template take_zeroed<T>(C::padded(keys)), arena.template take<T>(keys),
                               arena.template take<T>(keys)};
            C::copy(g, static_cast<int>(keys), rows[0]);
            C::fill(static_cast<int>(C::padded(keys)), rows[0],
                    [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return decay_of<C>(C::load(rows[0] + i)); });
            for (std::int64_t i = 0; i < keys; ++i) {
                rows[1][i] = rows[0][i] * k[i];
                rows[2][i] = rows[0][i] * q[i];
            }
            by_channel = rows[0];
            reading_k = rows[1];
            reading_q = rows[2];
        }
        const std::int64_t next_channel = p.channels && !anew;

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
                        by_key[c] += row * reading_k[i];
                        by_query[c] += row * reading_q[i];
                    }
            for (int c = 0; c < size; ++c) {
                written[c] = load(v, c);
                if (p.correct) written[c] -= by_key[c] * kept;
                written[c] *= rate;
                V output = (by_query[c] * kept + written[c] * overlap) * scale;
                if (in.skip) output += load(v, c) * in.skip[place % p.heads];
                store(output, out, c);
            }
            // From the last row on, which the nearest cache still has.
            for (std::int64_t i = keys - 1; i >= 0; --i)
                for (int c = 0; c < size; ++c) {
                    V row = written[c] * k[i];
                    if (!anew) row += load(before + i * values, c) * by_channel[i * next_channel];
                    store(row, after + i * values, c);
                }
        };
        C::template for_columns<most>(static_cast<int>(values), run_panel);
    }
};

}  // namespace fastweights
