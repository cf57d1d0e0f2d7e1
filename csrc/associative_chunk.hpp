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
    int steps = 0;            // the longest of the chunk's sequences
    std::int64_t first;
    std::int64_t length[L::chunk];  // 0 for a lane without a sequence
    std::int64_t shortest;
    Arena arena;

    Row *stored, *weights, *z, *u, *reads, *memory = nullptr;

    // What the inner loop of one step leaves for the backward pass: h_0 .. h_{S-1}, and the layer norms.
    struct Trace {
        Row *states, *normal, *deviation;
    };

    static std::int64_t forward_rows(const Problem& p) {
        const std::int64_t stride = padded(p.size);
        return (p.steps + 1) * (stride + 1) + trace_rows(p) + 3 * stride;
    }
    static std::int64_t trace_rows(const Problem& p) {
        return (p.inner_steps + p.norms) * padded(p.size) + p.norms;
    }
    static std::int64_t padded(std::int64_t size) { return (size + 7) / 8 * 8; }

    FASTWEIGHTS_INLINE Chunk(const Problem& p, const Inputs<T>& i, const Shared<T>& s, std::int64_t index,
                             std::int64_t extra_rows = 0)
        : problem(p), in(i), shared(s), size(p.size), stride(padded(p.size)), inner(p.inner_steps),
          first(index * L::chunk), shortest(p.steps),
          arena((forward_rows(p) + extra_rows + (i.memory ? p.size * padded(p.size) : 0)) * sizeof(Row)) {
        for (int lane = 0; lane < L::chunk; ++lane) {
            const std::int64_t b = first + lane;
            length[lane] = b >= p.batch ? 0 : in.lengths ? in.lengths[b] : p.steps;
            steps = std::max<int>(steps, length[lane]);
            shortest = std::min(shortest, length[lane]);
        }
        stored = arena.template take<Row>((p.steps + 1) * stride);
        weights = arena.template take<Row>(p.steps + 1);
        z = arena.template take<Row>(stride);
        u = arena.template take<Row>(stride);
        reads = arena.template take<Row>(stride);
        gather_batch(in.hidden, stored);
        if (in.memory == nullptr) return;
        memory = arena.template take<Row>(std::int64_t(size) * stride);
        for (int i0 = 0; i0 < size; ++i0) gather_batch(in.memory, memory + i0 * stride, size * size, i0 * size);
    }

    // In the chunk's part of the trace of all, or in scratch where nobody wants it.
    FASTWEIGHTS_INLINE Trace trace_of(int t, T* trace, Row* scratch) const {
        const std::int64_t chunks = (problem.batch + L::chunk - 1) / L::chunk;
        Row* const states = trace ? reinterpret_cast<Row*>(trace) + (t * chunks + first / L::chunk) * trace_rows(problem)
                                  : scratch;
        Row* const normal = states + inner * std::int64_t(stride);
        return {states, normal, normal + problem.norms * std::int64_t(stride)};
    }

    // Rows of [B, ...] tensors: every sequence of the batch counts, whatever its length.
    FASTWEIGHTS_INLINE void gather_batch(const T* source, Row* rows, std::int64_t pitch, std::int64_t offset = 0) {
        const T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane)
            lanes[lane] = first + lane < problem.batch ? source + (first + lane) * pitch + offset : nullptr;
        L::gather(lanes, size, rows);
    }
    FASTWEIGHTS_INLINE void gather_batch(const T* source, Row* rows) { gather_batch(source, rows, size); }

    FASTWEIGHTS_INLINE void scatter_batch(const Row* rows, T* target, std::int64_t pitch, std::int64_t offset = 0) {
        T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane)
            lanes[lane] = first + lane < problem.batch ? target + (first + lane) * pitch + offset : nullptr;
        L::scatter(rows, size, lanes);
    }

    // Rows of [T,B,H] tensors at step t: sequences that have ended read zeros, whatever the tensor holds there.
    FASTWEIGHTS_INLINE void gather_step(const T* source, int t, Row* rows) {
        const T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane)
            lanes[lane] = t < length[lane] ? source + (t * problem.batch + first + lane) * size : nullptr;
        L::gather(lanes, size, rows);
    }
    FASTWEIGHTS_INLINE void scatter_step(const Row* rows, int t, T* target) {
        scatter_batch(rows, target + t * problem.batch * size, size);
    }
    FASTWEIGHTS_INLINE void clear_after_end(T* target) {
        const std::int64_t count = std::min<std::int64_t>(L::chunk, problem.batch - first);
        for (std::int64_t t = steps; t < problem.steps; ++t)
            std::memset(target + (t * problem.batch + first) * size, 0, count * size * sizeof(T));
    }

    FASTWEIGHTS_INLINE void mask(int t, Row* rows) {  // zeros, by selection, where a sequence has ended
        if (t < shortest) return;
        T flags[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane) flags[lane] = t < length[lane];
        Row alive;
        std::memcpy(&alive, flags, sizeof alive);
        for (int i = 0; i < size; ++i)
            rows[i] = rows[i].map(alive, [](V x, V lives) FASTWEIGHTS_INLINE_LAMBDA { return lives != V{} ? x : V{}; });
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
        gather_step(in.drive, t, z);
        L::multiply(shared.weight, size, size, stored + t * stride, z);
        normalize_activate(z, problem.normalize_initial, inner, trace, trace.states);
        for (int s = 0; s < inner; ++s) {
            const Row* const state = trace.states + s * stride;
            std::copy(z, z + size, u);
            L::dot(stored, t + 1, stride, size, state, weights);
            weigh(weights, t, weights);
            L::mix(stored, t + 1, stride, size, weights, u);
            if (in.memory) read_memory(state, shared.kept[t], u);
            normalize_activate(u, true, s, trace, s + 1 < inner ? trace.states + (s + 1) * stride : next);
        }
    }

    FASTWEIGHTS_INLINE void weigh(const Row* score, int t, Row* result) {
        for (int n = 0; n <= t; ++n) result[n] = score[n] * shared.power[t - n];
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
