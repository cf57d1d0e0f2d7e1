// One chunk of sequences of the recurrence of Ba et al. 2016, in its attention form (eq 4), with
// src/fastweights/ops/associative/reference.py as its definition. The fast matrix is never formed: h(0) .. h(t) are kept
// and read by their scalar products.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "lanes.hpp"

namespace fastweights {

struct Problem {
    std::int64_t steps, batch, size;
    int inner_steps;
    bool tanh, normalize_initial;
    double decay, rate, eps;
};

template <class T>
struct Inputs {
    const T *drive, *weight, *gain, *shift, *hidden, *memory;  // gain, shift and memory may be null
    const std::int64_t* lengths;                               // may be null
};

template <class T>
struct Gradients {
    T *drive, *weight, *gain, *shift, *hidden, *memory;
};

// What every chunk of a call shares: the slow weights in the order in which they are read, and the powers of the decay.
template <class T>
struct Shared {
    std::vector<T> weight, weight_transposed;
    std::vector<T> power;  // rate decay^k
    std::vector<T> kept;   // decay^(t+1): what is left of the initial memory
};

struct Arena {  // one block of rows, cut up in order
    std::unique_ptr<void, void (*)(void*)> block;
    std::size_t used = 0;

    Arena(std::size_t bytes, std::size_t alignment)
        : block(std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment), std::free) {
        if (!block) throw std::bad_alloc();
    }
    template <class Row>
    Row* take(std::int64_t rows) {
        Row* start = reinterpret_cast<Row*>(static_cast<char*>(block.get()) + used);
        used += rows * sizeof(Row);
        return start;
    }
    template <class Row>
    Row* take_zeroed(std::int64_t rows) {
        return static_cast<Row*>(std::memset(take<Row>(rows), 0, rows * sizeof(Row)));
    }
};

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

    Row *stored, *states, *normal, *deviation, *scores, *weights, *z, *u, *reads, *memory = nullptr;

    static std::int64_t forward_rows(const Problem& p) {
        const std::int64_t stride = padded(p.size), s = p.inner_steps;
        return (p.steps + 1) * (stride + s + 1) + (s + 1) * (2 * stride + 1) + 3 * stride;
    }
    static std::int64_t padded(std::int64_t size) { return (size + 7) / 8 * 8; }

    FASTWEIGHTS_INLINE Chunk(const Problem& p, const Inputs<T>& i, const Shared<T>& s, std::int64_t index,
                             std::int64_t extra_rows)
        : problem(p), in(i), shared(s), size(p.size), stride(padded(p.size)), inner(p.inner_steps),
          first(index * L::chunk), shortest(p.steps),
          arena((forward_rows(p) + extra_rows + (i.memory ? p.size * padded(p.size) : 0)) * sizeof(Row), 64) {
        for (int lane = 0; lane < L::chunk; ++lane) {
            const std::int64_t b = first + lane;
            length[lane] = b >= p.batch ? 0 : in.lengths ? in.lengths[b] : p.steps;
            steps = std::max<int>(steps, length[lane]);
            shortest = std::min(shortest, length[lane]);
        }
        stored = arena.template take<Row>((p.steps + 1) * stride);
        states = arena.template take<Row>((inner + 1) * stride);
        normal = arena.template take<Row>((inner + 1) * stride);
        deviation = arena.template take<Row>(inner + 1);
        scores = arena.template take<Row>(inner * (p.steps + 1));
        weights = arena.template take<Row>(p.steps + 1);
        z = arena.template take<Row>(stride);
        u = arena.template take<Row>(stride);
        reads = arena.template take<Row>(stride);
        gather_batch(in.hidden, stored);
        if (in.memory == nullptr) return;
        memory = arena.template take<Row>(std::int64_t(size) * stride);
        for (int i0 = 0; i0 < size; ++i0) gather_batch(in.memory, memory + i0 * stride, size * size, i0 * size);
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
        for (int i = 0; i < size; ++i) {
            rows[i].a = alive.a != V{} ? rows[i].a : V{};
            rows[i].b = alive.b != V{} ? rows[i].b : V{};
        }
    }

    FASTWEIGHTS_INLINE V activate(V x) {
        if (!problem.tanh) return x < V{} ? V{} : x;  // in this order NaN stays NaN
        for (int lane = 0; lane < L::width; ++lane) x[lane] = std::tanh(x[lane]);
        return x;
    }
    FASTWEIGHTS_INLINE V slope(V state, V gradient) {  // gradient times f', from the value of f
        return problem.tanh ? gradient * (T(1) - state * state) : (state <= V{} ? V{} : gradient);
    }

    // state <- f(LN(x)); keeps the normalised vector and one over the deviation for the backward pass.
    FASTWEIGHTS_INLINE void normalize_activate(const Row* x, bool normalize, int slot, Row* state) {
        if (!normalize || in.gain == nullptr) {
            for (int i = 0; i < size; ++i) state[i] = {activate(x[i].a), activate(x[i].b)};
            return;
        }
        Row mean = L::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return x[i]; });
        mean.a /= T(size);
        mean.b /= T(size);
        const Row variance = L::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const V a = x[i].a - mean.a, b = x[i].b - mean.b;
            return Row{a * a, b * b};
        });
        Row& inverse = deviation[slot];
        for (int lane = 0; lane < L::width; ++lane) {
            inverse.a[lane] = T(1) / std::sqrt(variance.a[lane] / T(size) + T(problem.eps));
            inverse.b[lane] = T(1) / std::sqrt(variance.b[lane] / T(size) + T(problem.eps));
        }
        Row* normalized = normal + slot * stride;
        for (int i = 0; i < size; ++i) {
            normalized[i] = {(x[i].a - mean.a) * inverse.a, (x[i].b - mean.b) * inverse.b};
            state[i] = {activate(normalized[i].a * in.gain[i] + in.shift[i]),
                        activate(normalized[i].b * in.gain[i] + in.shift[i])};
        }
    }

    // Step t, from the stored h(0) .. h(t): states[s] is h_s, for every s of the inner loop.
    FASTWEIGHTS_INLINE void step(int t) {
        gather_step(in.drive, t, z);
        L::multiply(shared.weight.data(), size, stored + t * stride, z);
        normalize_activate(z, problem.normalize_initial, inner, states);
        for (int s = 0; s < inner; ++s) {
            const Row* state = states + s * stride;
            Row* score = scores + s * (problem.steps + 1);
            L::dot(stored, t + 1, stride, size, state, score);
            weigh(score, t, weights);
            std::copy(z, z + size, u);
            L::mix(stored, t + 1, stride, size, weights, u);
            if (in.memory) read_memory(state, shared.kept[t], u);
            normalize_activate(u, true, s, states + (s + 1) * stride);
        }
    }

    FASTWEIGHTS_INLINE void weigh(const Row* score, int t, Row* result) {
        for (int n = 0; n <= t; ++n)
            result[n] = {shared.power[t - n] * score[n].a, shared.power[t - n] * score[n].b};
    }

    FASTWEIGHTS_INLINE void read_memory(const Row* state, T kept, Row* result) {  // result += kept M state
        L::dot(memory, size, stride, size, state, reads);
        for (int i = 0; i < size; ++i) {
            result[i].a += kept * reads[i].a;
            result[i].b += kept * reads[i].b;
        }
    }

    FASTWEIGHTS_INLINE void forward(T* outputs) {
        for (int t = 0; t < steps; ++t) {
            step(t);
            Row* next = stored + (t + 1) * stride;
            std::copy(states + inner * stride, states + inner * stride + size, next);
            mask(t, next);
            scatter_step(next, t, outputs);
        }
        clear_after_end(outputs);
    }
};

}  // namespace fastweights
