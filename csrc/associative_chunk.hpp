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
    Row* strengths = nullptr;  // of every step, where they are given
    Row* visible = nullptr;    // whether h(n) is of the sequence that a lane is at, and at the end the memory it began with

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
          arena((forward_rows(p) + extra_rows + (i.memory ? p.size * padded(p.size) : 0) + (i.strengths ? p.steps : 0) +
                 (i.starts ? p.steps + 1 : 0)) *
                sizeof(Row)) {
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
        if (in.strengths) {
            strengths = arena.template take<Row>(p.steps);
            for (int t = 0; t < steps; ++t)
                strengths[t] = by_lane([&](int lane) FASTWEIGHTS_INLINE_LAMBDA {
                    return t < length[lane] ? in.strengths[t * problem.batch + first + lane] : T(0);
                });
        }
        if (in.starts) {
            visible = arena.template take<Row>(p.steps + 1);
            for (int lane = 0; lane < L::chunk; ++lane) look(lane, 0, steps);
        }
        if (in.memory == nullptr) return;
        memory = arena.template take<Row>(std::int64_t(size) * stride);
        for (int i0 = 0; i0 < size; ++i0) gather_batch(in.memory, memory + i0 * stride, size * size, i0 * size);
    }

    template <class Number>
    static FASTWEIGHTS_INLINE Row by_lane(Number number) {
        T numbers[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane) numbers[lane] = number(lane);
        Row row;
        std::memcpy(&row, numbers, sizeof row);
        return row;
    }
    // Of the hidden states up to h(last), a lane sees those from h(oldest) on, and the memory with h(0).
    FASTWEIGHTS_OUTLINE void look(int lane, int oldest, int last) const {
        const auto set = [&](int n, bool seen) FASTWEIGHTS_INLINE_LAMBDA {
            const T flag = seen;
            std::memcpy(reinterpret_cast<char*>(visible + n) + lane * sizeof(T), &flag, sizeof flag);
        };
        for (int n = 0; n <= last && n < problem.steps; ++n) set(n, n >= oldest);
        set(static_cast<int>(problem.steps), oldest == 0);
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
    FASTWEIGHTS_OUTLINE void gather_batch(const T* source, Row* rows, std::int64_t pitch, std::int64_t offset = 0) {
        const T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane)
            lanes[lane] = first + lane < problem.batch ? source + (first + lane) * pitch + offset : nullptr;
        L::gather(lanes, size, rows);
    }
    FASTWEIGHTS_INLINE void gather_batch(const T* source, Row* rows) { gather_batch(source, rows, size); }

    FASTWEIGHTS_OUTLINE void scatter_batch(const Row* rows, T* target, std::int64_t pitch, std::int64_t offset = 0) {
        T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane)
            lanes[lane] = first + lane < problem.batch ? target + (first + lane) * pitch + offset : nullptr;
        L::scatter(rows, size, lanes);
    }

    // Rows of [T,B,H] tensors at step t: sequences that have ended read zeros, whatever the tensor holds there.
    FASTWEIGHTS_OUTLINE void gather_step(const T* source, int t, Row* rows) {
        const T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane)
            lanes[lane] = t < length[lane] ? source + (t * problem.batch + first + lane) * size : nullptr;
        L::gather(lanes, size, rows);
    }
    FASTWEIGHTS_INLINE void scatter_step(const Row* rows, int t, T* target) {
        scatter_batch(rows, target + t * problem.batch * size, size);
    }
    FASTWEIGHTS_OUTLINE void clear_after_end(T* target) {
        const std::int64_t count = std::min<std::int64_t>(L::chunk, problem.batch - first);
        for (std::int64_t t = steps; t < problem.steps; ++t)
            std::memset(target + (t * problem.batch + first) * size, 0, count * size * sizeof(T));
    }

    // to <- from, and zeros, by selection, in lanes whose flag is zero.
    static FASTWEIGHTS_INLINE Row select(const Row& flags, const Row& x) {
        return x.map(flags, [](V v, V flag) FASTWEIGHTS_INLINE_LAMBDA { return flag != V{} ? v : V{}; });
    }
    FASTWEIGHTS_OUTLINE void select(const Row& flags, const Row* from, Row* to) const {
        for (int i = 0; i < size; ++i) to[i] = select(flags, from[i]);
    }
    FASTWEIGHTS_OUTLINE void mask(int t, Row* rows) {  // zeros where a sequence has ended
        if (t < shortest) return;
        select(by_lane([&](int lane) FASTWEIGHTS_INLINE_LAMBDA { return T(t < length[lane]); }), rows, rows);
    }

    // Whether flags [T,B] mark step t of a sequence here; `kept` is zero in its lane.
    FASTWEIGHTS_INLINE bool is_marked(const bool* flags, int t, int lane) const {
        return t < length[lane] && flags[t * problem.batch + first + lane];
    }
    FASTWEIGHTS_OUTLINE bool find(const bool* flags, int t, Row& kept) const {
        kept = Row{};
        if (flags == nullptr) return false;
        bool any = false;
        for (int lane = 0; lane < L::chunk; ++lane) any = any || is_marked(flags, t, lane);
        if (any) kept = by_lane([&](int lane) FASTWEIGHTS_INLINE_LAMBDA { return T(!is_marked(flags, t, lane)); });
        return any;
    }
    // Whether W sees zeros instead of h(t) in a lane: it restarts, or has been cleared.
    FASTWEIGHTS_INLINE bool hides(int t, Row& kept) const {
        Row other;
        const bool some = find(in.starts, t, kept), more = find(in.clears, t, other);
        if (some && more) kept = kept * other;
        else if (more) kept = other;
        return some || more;
    }
    // In the lanes whose flag is zero, whether a row of numbers is not zero.
    FASTWEIGHTS_OUTLINE bool is_any(const Row& flags, const Row& row) const {
        T flag[L::chunk], number[L::chunk];
        std::memcpy(flag, &flags, sizeof flag);
        std::memcpy(number, &row, sizeof number);
        bool any = false;
        for (int lane = 0; lane < L::chunk; ++lane) any = any || (flag[lane] == T(0) && !(number[lane] == T(0)));
        return any;
    }

    // Lanes that restart at step t no longer see what came before. A weight of zero would let NaN through, which
    // from h(n) and the memory has by then come to h(t): only then all are cleared.
    FASTWEIGHTS_OUTLINE void start_anew(int t) {
        Row kept;
        if (!find(in.starts, t, kept)) return;
        for (int lane = 0; lane < L::chunk; ++lane)
            if (is_marked(in.starts, t, lane)) look(lane, t + 1, t);
        const Row* const last = stored + std::int64_t(t) * stride;
        const Row strange = L::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return last[i] - last[i]; });
        if (t > 0 && !is_any(kept, strange)) return;
        for (int n = 0; n <= t; ++n) select(kept, stored + std::int64_t(n) * stride, stored + std::int64_t(n) * stride);
        for (int i = 0; memory && i < size; ++i) select(kept, memory + i * stride, memory + i * stride);
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
    FASTWEIGHTS_OUTLINE void normalize_activate(const Row* x, bool normalize, int slot, Trace trace, Row* state) {
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
    FASTWEIGHTS_OUTLINE void step(int t, Trace trace, Row* next) {
        const Row* hidden = stored + t * stride;
        Row kept;
        if (hides(t, kept)) {
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
            if (in.memory) read_memory(state, shared.kept[t], u);
            normalize_activate(u, true, s, trace, s + 1 < inner ? trace.states + (s + 1) * stride : next);
        }
    }

    FASTWEIGHTS_OUTLINE void weigh(const Row* score, int t, Row* result) {
        for (int n = 0; n <= t; ++n) result[n] = score[n] * shared.power[t - n];
        if (strengths)
            for (int n = 0; n <= t; ++n) result[n] = result[n] * strengths[n];
        if (visible)
            for (int n = 0; n <= t; ++n) result[n] = select(visible[n], result[n]);
    }

    FASTWEIGHTS_OUTLINE void read_memory(const Row* state, T kept, Row* result) {  // result += kept M state
        L::dot(memory, size, stride, size, state, reads);
        if (visible) select(visible[problem.steps], reads, reads);
        for (int i = 0; i < size; ++i) result[i] += reads[i] * kept;
    }

    FASTWEIGHTS_INLINE void forward(const Results<T>& out) {
        Row* const scratch = arena.template take<Row>(trace_rows(problem));
        for (int t = 0; t < steps; ++t) {
            Row* const next = stored + (t + 1) * stride;
            start_anew(t);
            step(t, trace_of(t, out.trace, scratch), next);
            mask(t, next);
            scatter_step(next, t, out.outputs);
        }
        clear_after_end(out.outputs);
    }
};

}  // namespace fastweights
