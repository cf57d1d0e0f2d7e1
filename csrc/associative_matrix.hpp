// One sequence of the recurrence of Ba et al. 2016 in its matrix form (eq 1), with
// src/fastweights/ops/associative/reference.py as its definition: the fast matrix is formed, and stays in the cache from
// one step to the next.
#pragma once

#include <algorithm>
#include <cmath>

#include "associative_problem.hpp"
#include "columns.hpp"

namespace fastweights {

template <class T, int Bytes>
struct Sequence {
    using C = Columns<T, Bytes>;
    using R = Registers<T, Bytes>;
    using V = typename C::V;

    // What the inner loop of one step leaves for the backward pass: h_0 .. h_S, and the layer norms before them.
    struct Trace {
        T *states, *normal, *inverse;  // [S+1][pitch] twice, [S+1]
    };

    const Problem& problem;
    const Inputs<T>& in;
    const Shared<T>& shared;
    const int size, pitch, inner;
    Arena arena;
    T *matrix, *hidden, *z, *scaled;
    Trace trace;
    T* initial = nullptr;  // the columns of the initial memory, where there is one

    static std::int64_t numbers(const Problem& p, bool memory) {
        const std::int64_t pitch = C::padded(p.size);
        return pitch * ((memory ? 2 : 1) * p.size + 3) + trace_numbers(p);
    }
    static std::int64_t trace_numbers(const Problem& p) {
        return (p.inner_steps + 1) * (2 * C::padded(p.size) + C::width);
    }

    FASTWEIGHTS_INLINE Sequence(const Problem& p, const Inputs<T>& i, const Shared<T>& s, std::int64_t extra = 0)
        : problem(p), in(i), shared(s), size(p.size), pitch(C::padded(p.size)), inner(p.inner_steps),
          arena((numbers(p, i.memory) + extra) * sizeof(T)) {
        matrix = arena.template take<T>(std::int64_t(size) * pitch);
        hidden = arena.template take<T>(pitch);
        z = arena.template take<T>(pitch);
        scaled = arena.template take<T>(pitch);
        trace = trace_at(arena.template take<T>(trace_numbers(p)));
        if (in.memory) initial = arena.template take<T>(std::int64_t(size) * pitch);
    }

    FASTWEIGHTS_INLINE Trace trace_at(T* start) const {
        const std::int64_t whole = (inner + 1) * std::int64_t(pitch);
        return {start, start + whole, start + 2 * whole};
    }

    FASTWEIGHTS_INLINE std::int64_t length(std::int64_t b) const { return in.lengths ? in.lengths[b] : problem.steps; }

    FASTWEIGHTS_INLINE void load_row(const T* source, T* row) const {
        std::memcpy(row, source, size * sizeof(T));
        std::fill(row + size, row + pitch, T(0));
    }
    FASTWEIGHTS_INLINE void load_columns(const T* rows, T* columns) const {
        C::transpose(rows, size, size, columns, pitch);
        for (int j = 0; j < size; ++j)
            std::fill(columns + std::int64_t(j) * pitch + size, columns + std::int64_t(j + 1) * pitch, T(0));
    }
    FASTWEIGHTS_INLINE T* at(T* tensor, std::int64_t t, std::int64_t b) const {
        return tensor + (t * problem.batch + b) * size;
    }
    FASTWEIGHTS_INLINE const T* at(const T* tensor, std::int64_t t, std::int64_t b) const {
        return tensor + (t * problem.batch + b) * size;
    }

    FASTWEIGHTS_INLINE V activate(V x) const {
        return problem.tanh ? R::tanh(x) : x < V{} ? V{} : x;  // in this order NaN stays NaN
    }

    // The sum of term(i) over the H numbers of a vector, in every lane; whatever the padding gives is left out.
    template <class Term>
    FASTWEIGHTS_INLINE V sum_of(Term term) const {
        V total = {};
        int i = 0;
        for (; i + C::width <= size; i += C::width) total += term(i);
        if (i < size) {
            V last = term(i);
            for (int lane = 0; lane < C::width; ++lane) last[lane] = i + lane < size ? last[lane] : T(0);
            total += last;
        }
        return R::sum(total);
    }

    // state <- f(LN(x)); keeps the normalised vector and one over the deviation.
    FASTWEIGHTS_INLINE void normalize_activate(const T* x, bool normalize, int slot, Trace trace, T* state) const {
        if (!normalize || in.gain == nullptr) {
            C::fill(pitch, state, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return activate(C::load(x + i)); });
            return;
        }
        const V mean = sum_of([&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(x + i); }) / T(size);
        const V variance = sum_of([&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const V difference = C::load(x + i) - mean;
            return difference * difference;
        });
        const T inverse = T(1) / std::sqrt(variance[0] / T(size) + T(problem.eps));
        trace.inverse[slot] = inverse;
        T* const normal = trace.normal + slot * pitch;
        C::fill(pitch, normal, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return (C::load(x + i) - mean) * inverse; });
        C::fill(pitch, state, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return activate(C::load(normal + i) * C::load(shared.gain + i) + C::load(shared.shift + i));
        });
    }

    // Step t from h(t): writes h(t) into the matrix, reads it in every inner step, and leaves h(t+1) = states[S].
    FASTWEIGHTS_INLINE void step(std::int64_t t, std::int64_t b, const T* h, T left_of_initial, Trace trace) {
        load_row(at(in.drive, t, b), z);
        C::multiply(shared.weight, h, size, pitch, T(1), z);
        normalize_activate(z, problem.normalize_initial, inner, trace, trace.states);
        for (int s = 0; s < inner; ++s) {
            const T* const state = trace.states + s * pitch;
            T* const read = trace.normal + s * pitch;  // the sum that is about to be normalised there
            std::copy(z, z + pitch, read);
            if (s == 0) {
                C::fill(pitch, scaled, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(h + i) * T(problem.rate); });
                C::write_read(matrix, T(problem.decay), scaled, h, state, size, pitch, read);
            } else {
                C::multiply(matrix, state, size, pitch, T(1), read);
            }
            if (left_of_initial != T(0)) C::multiply(initial, state, size, pitch, left_of_initial, read);
            normalize_activate(read, true, s, trace, trace.states + (s + 1) * pitch);
        }
    }

    FASTWEIGHTS_INLINE void forward(std::int64_t b, T* outputs, T* final) {
        const std::int64_t length = this->length(b);
        std::fill(matrix, matrix + std::int64_t(size) * pitch, T(0));
        if (in.memory) load_columns(in.memory + b * size * size, matrix);
        load_row(in.hidden + b * size, hidden);
        for (std::int64_t t = 0; t < length; ++t) {
            step(t, b, hidden, T(0), trace);
            std::copy(trace.states + inner * pitch, trace.states + (inner + 1) * pitch, hidden);
            std::memcpy(at(outputs, t, b), hidden, size * sizeof(T));
        }
        for (std::int64_t t = length; t < problem.steps; ++t) std::memset(at(outputs, t, b), 0, size * sizeof(T));
        if (final == nullptr) return;
        C::transpose(matrix, pitch, size, final + b * size * size, size);
    }
};

}  // namespace fastweights
