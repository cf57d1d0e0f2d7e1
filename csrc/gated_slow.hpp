// The slow network of Schlag & Schmidhuber 2017 (eq 3 and 4), sequences side by side, with
// src/fastweights/ops/gated/reference.py as its definition. Only what its next state needs is here: the products over
// all steps at once are left to the caller.
#pragma once

#include <algorithm>

#include "arena.hpp"
#include "columns.hpp"
#include "lanes.hpp"

namespace fastweights {

struct SlowProblem {
    std::int64_t steps, batch;
    int inner, size;  // P, S
};

template <class T>
struct SlowInputs {
    const T *drive, *weight_hh, *weight_z, *bias_z, *hidden;  // [T,B,P], [P,S], [S,P], [S], [B,S]
    const std::int64_t* lengths;                              // may be null
    const bool* starts;                                       // may be null
};

template <class T>
struct SlowResults {
    T *inners, *states;  // [B,T,P], [T,B,S]
};

template <class T>
struct SlowGradients {
    T *drive, *z, *hidden;  // [T,B,P], [B,T,S], [B,S]
};

template <class T>
struct SlowShared {  // the weights, packed, and in the backward pass their transposes
    Arena arena;
    T *weight_hh, *weight_z;
};

// The chunks from `begin` on and before `end`, at each level: gated_level.cpp.
#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                    \
    void slow_forward_##NAME(const SlowProblem& p, const SlowInputs<T>& in, const SlowShared<T>& s,                    \
                             const SlowResults<T>& out, std::int64_t begin, std::int64_t end);                         \
    void slow_backward_##NAME(const SlowProblem& p, const SlowInputs<T>& in, const SlowShared<T>& s,                   \
                              const SlowResults<T>& from, const SlowResults<T>& grads, const SlowGradients<T>& out,    \
                              std::int64_t begin, std::int64_t end);
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)
#undef FASTWEIGHTS_VARIANT

template <class T, int Bytes>
struct SlowChunk {
    using L = Lanes<T, Bytes>;
    using R = Registers<T, Bytes>;
    using Row = typename L::Row;
    using V = typename L::V;

    const SlowProblem& problem;
    const SlowShared<T>& shared;
    const bool* const starts;
    const int inner, size;
    const std::int64_t first;
    std::int64_t length[L::chunk];  // 0 for a lane without a sequence
    std::int64_t shortest;
    Arena arena;
    Row *hidden, *inside, *z, *next;

    static int padded(int rows) { return (rows + 7) / 8 * 8; }

    FASTWEIGHTS_INLINE SlowChunk(const SlowProblem& p, const SlowInputs<T>& in, const SlowShared<T>& s,
                                 std::int64_t index)
        : problem(p), shared(s), starts(in.starts), inner(p.inner), size(p.size), first(index * L::chunk), shortest(p.steps),
          arena((2 * padded(p.inner) + 4 * padded(p.size)) * sizeof(Row)) {
        for (int lane = 0; lane < L::chunk; ++lane) {
            const std::int64_t b = first + lane;
            length[lane] = b >= p.batch ? 0 : in.lengths ? in.lengths[b] : p.steps;
            shortest = std::min(shortest, length[lane]);
        }
        inside = arena.template take_zeroed<Row>(padded(inner));
        next = arena.template take_zeroed<Row>(padded(inner));
        hidden = arena.template take_zeroed<Row>(padded(size));
        z = arena.template take_zeroed<Row>(padded(size));
    }

    // Where the row of a step and sequence lies: in [T,B,rows], or in [B,T,rows], whose sequences the fast network and
    // the products that go with it take one after the other.
    enum Order { step_by_step, whole_sequences };
    FASTWEIGHTS_INLINE std::int64_t row_of(std::int64_t t, std::int64_t b, Order order) const {
        return order == step_by_step ? t * problem.batch + b : b * problem.steps + t;
    }

    // The rows of a tensor at step t. Sequences that have ended read zeros where `all` is not set.
    FASTWEIGHTS_OUTLINE void gather(const T* source, std::int64_t t, int rows, bool all, Row* to,
                                    Order order = step_by_step) const {
        const T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane) {
            const std::int64_t b = first + lane;
            const bool there = b < problem.batch && (all || t < length[lane]);
            lanes[lane] = there ? source + row_of(t, b, order) * rows : nullptr;
        }
        L::gather(lanes, rows, to);
    }
    FASTWEIGHTS_OUTLINE void scatter(const Row* from, std::int64_t t, int rows, T* target,
                                     Order order = step_by_step) const {
        T* lanes[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane) {
            const std::int64_t b = first + lane;
            lanes[lane] = b < problem.batch ? target + row_of(t, b, order) * rows : nullptr;
        }
        L::scatter(from, rows, lanes);
    }

    // Asks for the rows of a step in [B,T,rows]: those of a chunk lie in more places than the processor can foresee.
    FASTWEIGHTS_INLINE void prefetch(const T* source, std::int64_t t, int rows) const {
        if (t < 0) return;
        for (int lane = 0; lane < L::chunk && first + lane < problem.batch; ++lane)
            Columns<T, Bytes>::prefetch(source + row_of(t, first + lane, whole_sequences) * rows, rows);
    }

    // to <- from where a sequence goes on at step t, zeros or what was there elsewhere.
    FASTWEIGHTS_INLINE void select(std::int64_t t, int rows, const Row* from, bool keep, Row* to) const {
        if (t < shortest) {
            if (from != to) std::copy(from, from + rows, to);
            return;
        }
        T flags[L::chunk];
        for (int lane = 0; lane < L::chunk; ++lane) flags[lane] = t < length[lane];
        Row alive;
        std::memcpy(&alive, flags, sizeof alive);
        for (int i = 0; i < rows; ++i) {
            const Row other = keep ? to[i] : Row{};
            to[i] = {alive.a != V{} ? from[i].a : other.a, alive.b != V{} ? from[i].b : other.b};
        }
    }

    // The state, or its gradient, is zero where a sequence restarts at step t.
    FASTWEIGHTS_OUTLINE void start_anew(std::int64_t t) const {
        if (starts == nullptr) return;
        T flags[L::chunk];
        bool any = false;
        for (int lane = 0; lane < L::chunk; ++lane) {
            const bool marked = t < length[lane] && starts[t * problem.batch + first + lane];
            flags[lane] = !marked;
            any = any || marked;
        }
        if (!any) return;
        Row kept;
        std::memcpy(&kept, flags, sizeof kept);
        for (int i = 0; i < size; ++i)
            hidden[i] = hidden[i].map(kept, [](V x, V keep) FASTWEIGHTS_INLINE_LAMBDA { return keep != V{} ? x : V{}; });
    }

    FASTWEIGHTS_INLINE void forward(const SlowInputs<T>& in, const SlowResults<T>& out) {
        gather(in.hidden, 0, size, true, hidden);
        for (std::int64_t t = 0; t < problem.steps; ++t) {
            start_anew(t);
            gather(in.drive, t, inner, false, inside);
            L::multiply(shared.weight_hh, inner, size, hidden, inside);
            for (int i = 0; i < inner; ++i) inside[i] = inside[i].map(R::tanh);
            select(t, inner, inside, false, inside);
            scatter(inside, t, inner, out.inners, whole_sequences);
            for (int i = 0; i < size; ++i) z[i] = Row{V{} + in.bias_z[i], V{} + in.bias_z[i]};
            L::multiply(shared.weight_z, size, inner, inside, z);
            for (int i = 0; i < size; ++i) z[i] = z[i].map(R::tanh);
            select(t, size, z, true, hidden);
            scatter(hidden, t, size, out.states);
        }
    }

    // `shared` has the transposes.
    FASTWEIGHTS_INLINE void backward(const SlowResults<T>& from, const T* grad_inners, const T* grad_states,
                                     const SlowGradients<T>& out) {
        Row* const grad = arena.template take_zeroed<Row>(padded(size));
        Row* const through = arena.template take_zeroed<Row>(padded(size));
        std::fill(hidden, hidden + size, Row{});  // here the gradient of the state after the step
        for (std::int64_t t = problem.steps - 1; t >= 0; --t) {
            if (grad_states) {
                gather(grad_states, t, size, true, grad);
                for (int i = 0; i < size; ++i) hidden[i] += grad[i];
            }
            prefetch(grad_inners, t - 1, inner);
            prefetch(from.inners, t - 1, inner);
            prefetch(out.z, t - 1, size);
            gather(from.states, t, size, false, z);
            for (int i = 0; i < size; ++i) z[i] = hidden[i] - hidden[i] * z[i] * z[i];
            select(t, size, z, false, grad);  // zeros where the state stood still
            scatter(grad, t, size, out.z, whole_sequences);
            gather(grad_inners, t, inner, false, inside, whole_sequences);
            L::multiply(shared.weight_z, inner, size, grad, inside);
            gather(from.inners, t, inner, false, next, whole_sequences);
            for (int i = 0; i < inner; ++i) inside[i] = inside[i] - inside[i] * next[i] * next[i];
            scatter(inside, t, inner, out.drive);
            std::fill(through, through + padded(size), Row{});
            L::multiply(shared.weight_hh, size, inner, inside, through);
            select(t, size, through, true, hidden);
            start_anew(t);
        }
        scatter(hidden, 0, size, out.hidden);
    }
};

}  // namespace fastweights
