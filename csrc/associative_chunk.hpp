// One chunk of sequences of the recurrence of Ba et al. 2016, in its attention form (eq 4), with
// src/fastweights/ops/associative/reference.py as its definition. The fast matrix is never formed: h(0) .. h(t) are kept
// and read by their scalar products.
#pragma once

#include <algorithm>
#include <cmath>

#include "associative_problem.hpp"
#include "lanes.hpp"

namespace fastweights {

template <class T, int Bytes>
struct Chunk {
    using L = Lanes<T, Bytes>;
    using Row = typename L::Row;
    using V = typename L::V;

    const Problem& problem;
    const Inputs<T>& in;
    const Shared<T>& shared;
    int size, stride, inner;  // stride: rows a vector takes, padded so that blocks of rows may overrun
    const std::int64_t index;
    const int steps;                    // of the chunk's longest episode
    const std::int64_t before;          // steps of the chunks before it, which come first in the trace
    const Episode* episode[L::chunk];   // null for a lane without one
    std::int64_t length[L::chunk];      // and 0
    std::int64_t shortest;
    Arena arena;

    Row *stored, *weights, *z, *u, *reads;
    Row *memory = nullptr, *strengths = nullptr;  // of the episodes that begin with one; of every step

    // What the inner loop of one step leaves for the backward pass: h_0 .. h_{S-1}, and the layer norms.
    struct Trace {
        Row *states, *normal, *deviation;
    };

    static std::int64_t forward_rows(const Problem& p, const Inputs<T>& i, const Shared<T>& s, std::int64_t index) {
        const std::int64_t stride = padded(p.size), steps = longest(s, index);
        return (steps + 1) * (stride + 1) + trace_rows(p) + 3 * stride + (remembers(i, s, index) ? p.size * stride : 0) +
               (i.strengths ? steps : 0);
    }
    // Of the episodes of a chunk, the most steps; and whether one of them begins with a memory.
    static int longest(const Shared<T>& s, std::int64_t index) {
        std::int64_t most = 0;
        for_each(s, index, [&](const Episode& e) { most = std::max(most, e.length); });
        return static_cast<int>(most);
    }
    static bool remembers(const Inputs<T>& i, const Shared<T>& s, std::int64_t index) {
        bool any = false;
        for_each(s, index, [&](const Episode& e) { any = any || e.is_given(); });
        return any && i.memory;
    }
    template <class Visit>
    static void for_each(const Shared<T>& s, std::int64_t index, Visit visit) {
        const std::int64_t end = std::min<std::int64_t>((index + 1) * L::chunk, s.episodes.size());
        for (std::int64_t i = index * L::chunk; i < end; ++i) visit(s.episodes[i]);
    }
    static std::int64_t trace_rows(const Problem& p) {
        return (p.inner_steps + p.norms) * padded(p.size) + p.norms;
    }
    static std::int64_t padded(std::int64_t size) { return (size + 7) / 8 * 8; }

    FASTWEIGHTS_INLINE Chunk(const Problem& p, const Inputs<T>& i, const Shared<T>& s, std::int64_t number,
                             std::int64_t extra_rows = 0)
        : problem(p), in(i), shared(s), size(p.size), stride(padded(p.size)), inner(p.inner_steps), index(number),
          steps(longest(s, number)), before(steps_before(s, number)), shortest(p.steps),
          arena((forward_rows(p, i, s, number) + extra_rows) * sizeof(Row)) {
        const std::int64_t first = index * L::chunk, count = s.episodes.size();
        for (int lane = 0; lane < L::chunk; ++lane) {
            episode[lane] = first + lane < count ? &s.episodes[first + lane] : nullptr;
            length[lane] = episode[lane] ? episode[lane]->length : 0;
            shortest = std::min(shortest, length[lane]);
        }
        stored = arena.template take<Row>((steps + std::int64_t(1)) * stride);
        weights = arena.template take<Row>(steps + std::int64_t(1));
        z = arena.template take<Row>(stride);
        u = arena.template take<Row>(stride);
        reads = arena.template take<Row>(stride);
        gather_given(in.hidden, stored, size);
        if (remembers(i, s, number)) {
            memory = arena.template take<Row>(std::int64_t(size) * stride);
            for (int i0 = 0; i0 < size; ++i0) gather_given(in.memory, memory + i0 * stride, size * size, i0 * size);
        }
        if (in.strengths == nullptr) return;
        strengths = arena.template take<Row>(steps);
        for (int t = 0; t < steps; ++t)
            strengths[t] = by_lane([&](int lane) FASTWEIGHTS_INLINE_LAMBDA {
                return t < length[lane] ? in.strengths[place(t, lane)] : T(0);
            });
    }

    // Where a lane's step t lies in a [T,B] tensor.
    FASTWEIGHTS_INLINE std::int64_t place(std::int64_t t, int lane) const {
        return (episode[lane]->begin + t) * problem.batch + episode[lane]->b;
    }
    template <class Number>
    static FASTWEIGHTS_INLINE Row by_lane(Number number) {
        T numbers[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane) numbers[lane] = number(lane);
        Row row;
        std::memcpy(&row, numbers, sizeof row);
        return row;
    }

    // Where sequences start anew, all chunks together have at most the steps of whole sequences and of one chunk more:
    // they are sorted, so that a chunk's lanes have as many steps as the longest of the next, and all lanes T B in all.
    static std::int64_t steps_before(const Shared<T>& s, std::int64_t index) {
        std::int64_t rows = 0;
        for (std::int64_t i = 0; i < index; ++i) rows += longest(s, i);
        return rows;
    }
    // In the chunk's part of the trace of all, or in scratch where nobody wants it.
    FASTWEIGHTS_INLINE Trace trace_of(int t, T* trace, Row* scratch) const {
        Row* const states = trace ? reinterpret_cast<Row*>(trace) + (before + t) * trace_rows(problem) : scratch;
        Row* const normal = states + inner * std::int64_t(stride);
        return {states, normal, normal + problem.norms * std::int64_t(stride)};
    }

    // Rows of [B, ...] tensors: those of episodes that begin with the state that was given; others read zeros.
    FASTWEIGHTS_INLINE bool is_given(int lane) const { return episode[lane] && episode[lane]->is_given(); }
    FASTWEIGHTS_INLINE void gather_given(const T* source, Row* rows, std::int64_t pitch, std::int64_t offset = 0) {
        const T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane)
            lanes[lane] = is_given(lane) ? source + episode[lane]->b * pitch + offset : nullptr;
        L::gather(lanes, size, rows);
    }
    FASTWEIGHTS_INLINE void scatter_given(const Row* rows, T* target, std::int64_t pitch, std::int64_t offset = 0) {
        T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane)
            lanes[lane] = is_given(lane) ? target + episode[lane]->b * pitch + offset : nullptr;
        L::scatter(rows, size, lanes);
    }

    // Rows of [T,B,H] tensors at step t: episodes that have ended read zeros, whatever the tensor holds there.
    FASTWEIGHTS_INLINE void gather_step(const T* source, int t, Row* rows) {
        const T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane)
            lanes[lane] = t < length[lane] ? source + place(t, lane) * size : nullptr;
        L::gather(lanes, size, rows);
    }
    FASTWEIGHTS_INLINE void scatter_step(const Row* rows, int t, T* target) {
        T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane)
            lanes[lane] = t < length[lane] ? target + place(t, lane) * size : nullptr;
        L::scatter(rows, size, lanes);
    }
    FASTWEIGHTS_INLINE void clear_after_end(T* target) {
        for (int lane = 0; lane < L::chunk && episode[lane]; ++lane)
            for (std::int64_t t = length[lane]; t < episode[lane]->span; ++t)
                std::memset(target + place(t, lane) * size, 0, size * sizeof(T));
    }

    // to <- from, and zeros, by selection, in lanes whose flag is zero.
    FASTWEIGHTS_INLINE void select(const Row& flags, const Row* from, Row* to) const {
        for (int i = 0; i < size; ++i)
            to[i] = from[i].map(flags, [](V x, V flag) FASTWEIGHTS_INLINE_LAMBDA { return flag != V{} ? x : V{}; });
    }
    FASTWEIGHTS_INLINE void mask(int t, Row* rows) {  // zeros where an episode has ended
        if (t < shortest) return;
        select(by_lane([&](int lane) FASTWEIGHTS_INLINE_LAMBDA { return T(t < length[lane]); }), rows, rows);
    }
    // Whether a lane's hidden state is cleared once it is written at step t, and which lanes keep theirs.
    FASTWEIGHTS_INLINE bool clears(int t, Row& kept) const {
        if (in.clears == nullptr) return false;
        bool any = false;
        kept = by_lane([&](int lane) FASTWEIGHTS_INLINE_LAMBDA {
            const bool clear = t < length[lane] && in.clears[place(t, lane)];
            any = any || clear;
            return T(!clear);
        });
        return any;
    }

    FASTWEIGHTS_INLINE Row activate(const Row& x) {
        if (problem.tanh) return x.map(Registers<T, Bytes>::tanh);
        return x.map([](V v) FASTWEIGHTS_INLINE_LAMBDA { return v < V{} ? V{} : v; });  // in this order NaN stays NaN
    }
    FASTWEIGHTS_INLINE Row slope(const Row& state, const Row& gradient) {  // gradient times f', from the value of f
        if (problem.tanh) return gradient - gradient * state * state;
        return state.map(gradient, [](V s, V g) FASTWEIGHTS_INLINE_LAMBDA { return s <= V{} ? V{} : g; });
    }

    // state <- f(LN(x)); keeps the normalised vector and one over the deviation for the backward pass.
    FASTWEIGHTS_INLINE void normalize_activate(const Row* x, bool normalize, int slot, Trace trace, Row* state) {
        if (!normalize || in.gain == nullptr) {
            for (int i = 0; i < size; ++i) state[i] = activate(x[i]);
            return;
        }
        const Row mean = L::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return x[i]; }) * (T(1) / T(size));
        const Row variance = L::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const Row difference = x[i] - mean;
            return difference * difference;
        });
        const Row inverse = variance.map([&](V v) FASTWEIGHTS_INLINE_LAMBDA {
            for (int lane = 0; lane < L::width; ++lane) v[lane] = T(1) / std::sqrt(v[lane] / T(size) + T(problem.eps));
            return v;
        });
        trace.deviation[slot] = inverse;
        Row* const normalized = trace.normal + slot * stride;
        for (int i = 0; i < size; ++i) {
            normalized[i] = (x[i] - mean) * inverse;
            state[i] = activate(normalized[i] * in.gain[i] + in.shift[i]);
        }
    }

    // Step t, from the stored h(0) .. h(t), to h(t+1) = `next`.
    FASTWEIGHTS_INLINE void step(int t, Trace trace, Row* next) {
        const Row* hidden = stored + t * stride;
        Row kept;
        if (clears(t, kept)) {
            select(kept, hidden, u);
            hidden = u;
        }
        gather_step(in.drive, t, z);
        L::multiply(shared.weight, size, size, hidden, z);
        normalize_activate(z, problem.normalize_initial, inner, trace, trace.states);
        for (int s = 0; s < inner; ++s) {
            const Row* const state = trace.states + s * stride;
            std::copy(z, z + size, u);
            L::dot(stored, t + 1, stride, size, state, weights);
            weigh(weights, t, weights);
            L::mix(stored, t + 1, stride, size, weights, u);
            if (memory) read_memory(state, shared.kept[t], u);
            normalize_activate(u, true, s, trace, s + 1 < inner ? trace.states + (s + 1) * stride : next);
        }
    }

    FASTWEIGHTS_INLINE void weigh(const Row* score, int t, Row* result) {
        for (int n = 0; n <= t; ++n) result[n] = score[n] * shared.power[t - n];
        if (strengths)
            for (int n = 0; n <= t; ++n) result[n] = result[n] * strengths[n];
    }

    FASTWEIGHTS_INLINE void read_memory(const Row* state, T kept, Row* result) {  // result += kept M state
        L::dot(memory, size, stride, size, state, reads);
        for (int i = 0; i < size; ++i) result[i] += reads[i] * kept;
    }

    FASTWEIGHTS_INLINE void forward(const Results<T>& out) {
        Row* const scratch = arena.template take<Row>(trace_rows(problem));
        for (int t = 0; t < steps; ++t) {
            Row* const next = stored + (t + 1) * stride;
            step(t, trace_of(t, out.trace, scratch), next);
            mask(t, next);
            scatter_step(next, t, out.outputs);
        }
        clear_after_end(out.outputs);
    }
};

}  // namespace fastweights
