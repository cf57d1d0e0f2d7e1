// The fast network of Schlag & Schmidhuber 2017 (eq 2 and 5 to 8), one sequence at a time, with
// src/fastweights/ops/gated/reference.py as its definition: both fast matrices stay in the nearest cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "arena.hpp"
#include "columns.hpp"

namespace fastweights {

struct FastProblem {
    std::int64_t steps, batch;
    int size, features;  // H, D
    double eps;
    std::int64_t trace_numbers;  // of a step of a sequence, as Python counts them
};

template <class T>
struct FastInputs {
    const T *updates, *x, *hidden, *fast_1, *fast_2;  // [T,B,4H+2M+2N], [T,B,D], [B,H], [B,H,M], [B,H,N]
    const std::int64_t* lengths;                      // may be null
};

template <class T>
struct FastResults {
    T *outputs, *fast_1, *fast_2, *trace;  // [T,B,H], [B,H,M], [B,H,N], and null or [T,B,trace_numbers]
};

template <class T>
struct FastGradients {
    T *updates, *x, *hidden, *fast_1, *fast_2;
};

template <class T, int Bytes>
struct FastSequence {
    using C = Columns<T, Bytes>;
    using R = Registers<T, Bytes>;
    using V = typename C::V;
    static constexpr int width = C::width;

    // What one step does to a fast matrix: what is written, a row and a column, and how far each is let through.
    struct Update {
        T *row, *column, *row_gate, *column_gate;
    };
    struct Trace {  // of one step, for the backward pass
        Update first, second;
        T *inside, *statistics;  // a; one over the deviation and the mean, of each layer norm
    };

    const FastProblem& problem;
    const FastInputs<T>& in;
    const int size, features, columns_1, columns_2, pitch;  // pitch: numbers of a column, H and zeros
    Arena arena;
    T *fast_1, *fast_2, *x_1, *x_2, *sums, *scratch;
    std::int64_t b = 0, length = 0;

    static int padded(int n) { return static_cast<int>(C::padded(n)); }
    static std::int64_t trace_numbers(const FastProblem& p) {
        return 5 * padded(p.size) + 2 * padded(p.size + p.features + 1) + 2 * padded(p.size + 1) + padded(4);
    }
    std::int64_t matrices() const { return std::int64_t(pitch) * (columns_1 + columns_2); }

    FASTWEIGHTS_INLINE FastSequence(const FastProblem& p, const FastInputs<T>& i, std::int64_t extra = 0)
        : problem(p), in(i), size(p.size), features(p.features), columns_1(p.size + p.features + 1),
          columns_2(p.size + 1), pitch(padded(p.size)),
          arena((matrices() + padded(columns_1) + padded(columns_2) + pitch + trace_numbers(p) + extra) * sizeof(T)) {
        // Python makes the trace, and counts it by itself.
        if (p.trace_numbers != trace_numbers(p)) throw std::length_error("a trace was counted wrong");
        fast_1 = arena.template take<T>(matrices());  // both, one after the other
        fast_2 = fast_1 + std::int64_t(pitch) * columns_1;
        x_1 = arena.template take_zeroed<T>(padded(columns_1));
        x_2 = arena.template take_zeroed<T>(padded(columns_2));
        sums = arena.template take_zeroed<T>(pitch);
        scratch = arena.template take_zeroed<T>(trace_numbers(p));
        x_1[columns_1 - 1] = x_2[columns_2 - 1] = T(1);  // the bias's input
    }

    FASTWEIGHTS_INLINE Trace trace_of(std::int64_t t, T* trace) const {
        T* at = trace ? trace + (t * problem.batch + b) * trace_numbers(problem) : scratch;
        const auto take = [&](int numbers) {
            T* const start = at;
            at += padded(numbers);
            return start;
        };
        const auto update = [&](int columns) {
            T *const row = take(size), *const column = take(columns), *const row_gate = take(size);
            return Update{row, column, row_gate, take(columns)};
        };
        Trace result{update(columns_1), update(columns_2), nullptr, nullptr};
        result.inside = take(size);
        result.statistics = take(4);
        return result;
    }

    template <class Number>
    FASTWEIGHTS_INLINE Number* at(Number* tensor, std::int64_t t, int numbers) const {
        return tensor + (t * problem.batch + b) * numbers;
    }
    int update_numbers() const { return 4 * size + 2 * (columns_1 + columns_2); }

    // to <- f(from), the padding zero.
    template <class Function>
    FASTWEIGHTS_INLINE void map(const T* from, int numbers, T* to, Function f) const {
        C::store(V{}, to + padded(numbers) - width);
        R::for_blocks(numbers, [&](int i, int count) FASTWEIGHTS_INLINE_LAMBDA {
            V v = {};
            std::memcpy(&v, from + i, count * sizeof(T));
            v = f(v);
            std::memcpy(to + i, &v, count * sizeof(T));
        });
    }
    static FASTWEIGHTS_INLINE V sigmoid(V x) { return R::tanh(x * T(0.5)) * T(0.5) + T(0.5); }

    // The parts of an update, from their row of the tensor.
    FASTWEIGHTS_INLINE const T* activate(const T* from, int columns, Update update) const {
        const auto squash = [](V v) FASTWEIGHTS_INLINE_LAMBDA { return R::tanh(v); };
        const auto gate = [](V v) FASTWEIGHTS_INLINE_LAMBDA { return sigmoid(v); };
        map(from, size, update.row, squash);
        map(from + size, columns, update.column, squash);
        map(from + size + columns, size, update.row_gate, gate);
        map(from + 2 * size + columns, columns, update.column_gate, gate);
        return from + 2 * (size + columns);
    }

    // F <- G * H + (1 - G) * F, from one place to another or the same.
    FASTWEIGHTS_INLINE void write(const T* from, Update u, int columns, T* to) const {
        C::for_panels(pitch, [&](int i, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            V row[block], gate[block];
            for (int k = 0; k < block; ++k) {
                row[k] = C::load(u.row + i + k * width);
                gate[k] = C::load(u.row_gate + i + k * width);
            }
            for (int j = 0; j < columns; ++j) {
                const T column = u.column[j], column_gate = u.column_gate[j];
                for (int k = 0; k < block; ++k) {
                    const std::int64_t place = std::int64_t(j) * pitch + i + k * width;
                    const V old = C::load(from + place);
                    C::store(old + gate[k] * column_gate * (row[k] * column - old), to + place);
                }
            }
        });
    }

    // result <- LN(tanh(F x)), the padding zero.
    FASTWEIGHTS_INLINE void layer(const T* fast, const T* x, int columns, T* statistics, T* result) const {
        std::fill(sums, sums + pitch, T(0));
        C::multiply(fast, x, columns, pitch, T(1), sums);
        C::fill(pitch, sums, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return R::tanh(C::load(sums + i)); });
        const V mean = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(sums + i); }) / T(size);
        const V variance = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const V difference = C::load(sums + i) - mean;
            return difference * difference;
        });
        const T inverse = T(1) / std::sqrt(variance[0] / T(size) + T(problem.eps));
        statistics[0] = inverse;
        statistics[1] = mean[0];
        C::fill(pitch, result, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return (C::load(sums + i) - mean) * inverse; });
        std::fill(result + size, result + pitch, T(0));
    }

    FASTWEIGHTS_INLINE void begin(std::int64_t index) {
        b = index;
        length = in.lengths ? in.lengths[b] : problem.steps;
        C::load_columns(in.fast_1 + b * size * columns_1, size, columns_1, fast_1, pitch);
        C::load_columns(in.fast_2 + b * size * columns_2, size, columns_2, fast_2, pitch);
    }

    FASTWEIGHTS_INLINE void forward(std::int64_t index, const FastResults<T>& out) {
        begin(index);
        C::copy(in.hidden + b * size, size, x_1);
        for (std::int64_t t = 0; t < length; ++t) {
            const Trace trace = trace_of(t, out.trace);
            C::copy(at(in.x, t, features), features, x_1 + size);
            layer(fast_1, x_1, columns_1, trace.statistics, trace.inside);
            C::copy(trace.inside, size, x_2);
            layer(fast_2, x_2, columns_2, trace.statistics + 2, sums);
            C::copy(sums, size, x_1);
            C::copy(sums, size, at(out.outputs, t, size));
            const T* const second = activate(at(in.updates, t, update_numbers()), columns_1, trace.first);
            activate(second, columns_2, trace.second);
            write(fast_1, trace.first, columns_1, fast_1);
            write(fast_2, trace.second, columns_2, fast_2);
        }
        for (std::int64_t t = length; t < problem.steps; ++t)
            std::memset(at(out.outputs, t, size), 0, size * sizeof(T));
        C::store_columns(fast_1, size, columns_1, pitch, out.fast_1 + b * size * columns_1);
        C::store_columns(fast_2, size, columns_2, pitch, out.fast_2 + b * size * columns_2);
    }
};

}  // namespace fastweights
