// The fast network of Schlag & Schmidhuber 2017 (eq 2 and 5 to 8), one sequence at a time, with
// src/fastweights/ops/gated/reference.py as its definition: both fast matrices stay in the nearest cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "arena.hpp"
#include "columns.hpp"
#include "episodes.hpp"
#include "products.hpp"

namespace fastweights {

struct FastProblem {
    std::int64_t steps, batch;
    int inner, size, features;  // P, H, D
    double eps;
    std::int64_t inside_numbers;  // of a step of a sequence, as Python counts them

    int update_numbers() const { return 8 * size + 2 * features + 4; }  // U
};

template <class T>
struct FastInputs {
    const T *inners, *weight, *bias;              // [B,T,P], [U,P] and [U] with U = 4H+2M+2N
    const T *x, *hidden, *fast_1, *fast_2;        // [T,B,D], [B,H], [B,H,M], [B,H,N]; a matrix that is null is zero
    const std::int64_t* lengths;  // [B], may be null
    const bool* starts;           // [T,B], may be null
};

template <class T>
struct FastResults {
    T *outputs, *fast_1, *fast_2;  // [T,B,H], [B,H,M], [B,H,N]
    T *squashed, *inside;          // for the backward pass, or null: [B,T,U] and [B,T,inside_numbers]
};

template <class T>
struct FastGradients {  // as FastInputs, those of the fast matrices null where nobody wants them
    T *inners, *weight, *bias, *x, *hidden, *fast_1, *fast_2;
};

template <class T>
struct FastShared {  // the weight in whole registers: its transpose [P,U], and in the backward pass itself [U,P+1]
    Arena arena;
    T* weight;
};

// The episodes from `begin` on and before `end`, at each level: gated_level.cpp.
#define FASTWEIGHTS_VARIANT(T, NAME, TARGET, BYTES)                                                                    \
    void fast_forward_##NAME(const FastProblem& p, const FastInputs<T>& in, const FastShared<T>& s,                    \
                             const FastResults<T>& out, const Episode* begin, const Episode* end);                     \
    void fast_backward_##NAME(const FastProblem& p, const FastInputs<T>& in, const FastShared<T>& s,                   \
                              const FastResults<T>& from, const FastResults<T>& grads, const FastGradients<T>& out,    \
                              T* weight_sums, const Episode* begin, const Episode* end);
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, float)
FASTWEIGHTS_FOR_EACH_LEVEL(FASTWEIGHTS_VARIANT, double)
#undef FASTWEIGHTS_VARIANT

template <class T, int Bytes>
struct FastSequence {
    using C = Columns<T, Bytes>;
    using R = Registers<T, Bytes>;
    using V = typename C::V;
    static constexpr int width = C::width;

    // What one step does to a fast matrix: what is written, a row and a column, and how far each is let through; and
    // the products of both rows and of both columns. The padding of the rows is zero, and so is that of the matrices:
    // the backward pass sums over it. The columns stay where they stand.
    struct Update {
        T *row, *row_gate, *gated_row, *gated_column;
        const T *column, *column_gate;
    };
    struct Inside {  // of one step, for the backward pass
        T *units, *statistics;  // a; one over the deviation and the mean, of each layer norm
    };

    using M = Multiplier<T, Bytes>;
    static constexpr int most_rows = 64;  // steps whose products with the weight are taken at once

    const FastProblem& problem;
    const FastInputs<T>& in;
    const T* const weight;
    const int inner, size, features, columns_1, columns_2, pitch;  // pitch: numbers of a column, H and zeros
    Arena arena;
    T *fast_1, *fast_2, *x_1, *x_2, *sums, *line, *unwanted, *updates;
    Update first, second;
    const Episode* episode = nullptr;
    std::int64_t length = 0;
    std::int64_t first_row = 0, end_row = 0;  // of [B,T]: those whose updates are there

    static int padded(int n) { return static_cast<int>(C::padded(n)); }
    static std::int64_t inside_numbers(const FastProblem& p) { return padded(p.size) + 4; }
    std::int64_t matrices() const { return std::int64_t(pitch) * (columns_1 + columns_2); }
    int update_numbers() const { return problem.update_numbers(); }

    FASTWEIGHTS_INLINE FastSequence(const FastProblem& p, const FastInputs<T>& i, const FastShared<T>& shared,
                                    std::int64_t extra = 0)
        : problem(p), in(i), weight(shared.weight), inner(p.inner), size(p.size), features(p.features),
          columns_1(p.size + p.features + 1), columns_2(p.size + 1), pitch(padded(p.size)),
          arena((matrices() + room(p) + 2 * pitch + padded(columns_1) + padded(columns_2) + padded(update_numbers()) +
                 width + padded(4) + most_rows * padded(update_numbers()) + extra) *
                sizeof(T)) {
        // Python makes what is kept, and counts it by itself.
        if (p.inside_numbers != inside_numbers(p)) throw std::length_error("the inside of a step was counted wrong");
        fast_1 = arena.template take<T>(matrices());  // both, one after the other
        fast_2 = fast_1 + std::int64_t(pitch) * columns_1;
        x_1 = arena.template take_zeroed<T>(padded(columns_1));
        x_2 = arena.template take_zeroed<T>(padded(columns_2));
        sums = arena.template take_zeroed<T>(pitch);
        line = arena.template take<T>(padded(update_numbers()) + width);
        updates = arena.template take<T>(most_rows * padded(update_numbers()));
        unwanted = arena.template take<T>(pitch + padded(4));
        make_room(first, second);
        x_1[columns_1 - 1] = x_2[columns_2 - 1] = T(1);  // the bias's input
    }

    static std::int64_t room(const FastProblem& p) {
        return 6 * C::padded(p.size) + C::padded(p.size + p.features + 1) + C::padded(p.size + 1);
    }
    FASTWEIGHTS_INLINE void make_room(Update& of_1, Update& of_2) {
        for (const auto& [update, columns] : {std::pair{&of_1, columns_1}, std::pair{&of_2, columns_2}}) {
            update->row = arena.template take_zeroed<T>(pitch);
            update->row_gate = arena.template take_zeroed<T>(pitch);
            update->gated_row = arena.template take_zeroed<T>(pitch);
            update->gated_column = arena.template take_zeroed<T>(padded(columns));
        }
    }

    FASTWEIGHTS_INLINE Inside inside_of(std::int64_t t, T* inside) const {
        T* const at = inside ? inside + row_of(t) * inside_numbers(problem) : unwanted;
        return {at, at + pitch};
    }
    template <class Number>
    FASTWEIGHTS_INLINE Number* at(Number* tensor, std::int64_t t, int numbers) const {
        return tensor + ((episode->begin + t) * problem.batch + episode->b) * numbers;
    }
    // Of a step, in tensors whose sequences are whole.
    FASTWEIGHTS_INLINE std::int64_t row_of(std::int64_t t) const {
        return episode->b * problem.steps + episode->begin + t;
    }
    template <class Number>
    FASTWEIGHTS_INLINE Number* updates_at(Number* tensor, std::int64_t t) const {
        return tensor + row_of(t) * update_numbers();
    }

    // The update of a row without the bias. With it come those of the rows behind, as many as there is room for before
    // the row `end`.
    FASTWEIGHTS_INLINE const T* update_of(std::int64_t row, std::int64_t end) {
        const int wide = padded(update_numbers());
        if (row < first_row || row >= end_row) {
            first_row = row;
            end_row = std::min(row + most_rows, end);
            M::template run_kind<Product<T>::whole>({Product<T>::whole, static_cast<int>(end_row - row), wide, inner,
                                                     in.inners + row * inner, inner, 1, weight, wide, updates, wide, false});
        }
        return updates + (row - first_row) * wide;
    }

    // Rows that the next step will read, of tensors [T,B,numbers] whose steps lie too far apart for the processor to
    // see them coming.
    template <class Number>
    FASTWEIGHTS_INLINE void prefetch(const Number* tensor, std::int64_t t, int numbers) const {
        if (t < 0 || t >= length) return;
        const char* const row = reinterpret_cast<const char*>(at(tensor, t, numbers));
        for (std::size_t byte = 0; byte < numbers * sizeof(T); byte += 64) __builtin_prefetch(row + byte);
    }

    // One matrix's part of the update's row of the tensor and of the bias, squashed.
    FASTWEIGHTS_OUTLINE void squash(const T* from, const T* bias, int numbers, T* to) const {
        const auto squashed = [&](int begin, bool gate) FASTWEIGHTS_INLINE_LAMBDA {
            const T slope = gate ? T(0.5) : T(1), shift = gate ? T(0.5) : T(0);  // sigmoid(x) = tanh(x / 2) / 2 + 1 / 2
            R::for_blocks(numbers, [&](int i, int count) FASTWEIGHTS_INLINE_LAMBDA {
                V v = {}, added = {};
                std::memcpy(&v, from + begin + i, count * sizeof(T));
                std::memcpy(&added, bias + begin + i, count * sizeof(T));
                v = R::tanh((v + added) * slope) * slope + shift;
                std::memcpy(to + begin + i, &v, count * sizeof(T));
            });
        };
        squashed(0, false);
        squashed(numbers, true);
    }

    // Both updates of a squashed row, whose columns they go on to read.
    FASTWEIGHTS_INLINE void take(const T* squashed, Update& of_1, Update& of_2) const {
        take(squashed, columns_1, of_1);
        take(squashed + 2 * (size + columns_1), columns_2, of_2);
    }
    FASTWEIGHTS_INLINE void take(const T* from, int columns, Update& u) const {
        u.column = from + size;
        u.column_gate = from + 2 * size + columns;
        // What is read past a part is the next one, and past the last of all the inside of steps, or `line`'s own padding.
        for (int i = 0; i < pitch; i += width) {
            const V row = R::head(C::load(from + i), size - i);
            const V gate = R::head(C::load(from + size + columns + i), size - i);
            C::store(row, u.row + i);
            C::store(gate, u.row_gate + i);
            C::store(row * gate, u.gated_row + i);
        }
        C::fill(padded(columns), u.gated_column, [&](int j) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(u.column + j) * C::load(u.column_gate + j);
        });
    }

    // An update's part for a panel of rows, in registers.
    template <int Block>
    struct Rows {
        V gate[Block], row[Block];
        FASTWEIGHTS_INLINE Rows(const Update& u, int i) {
            for (int k = 0; k < Block; ++k) {
                gate[k] = C::load(u.row_gate + i + k * width);
                row[k] = C::load(u.gated_row + i + k * width);
            }
        }
        // G * H + (1 - G) * F for a part of a column.
        FASTWEIGHTS_INLINE V written(int k, V old, T column_gate, T column) const {
            return (old - gate[k] * column_gate * old) + row[k] * column;
        }
    };

    // F <- G * H + (1 - G) * F, from one place to another or the same; and, where x is given, sums <- the new F x.
    template <bool Read>
    FASTWEIGHTS_OUTLINE void write(const T* from, Update u, int columns, T* to, const T* x = nullptr) const {
        const std::int64_t step = pitch;  // a store may change a member: the compiler would load it again for each place
        C::for_panels(pitch, [&](int i, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            const Rows<block> rows(u, i);
            V sum[block] = {};
            const T* old = from + i;
            T* now = to + i;
            for (int j = 0; j < columns; ++j, old += step, now += step) {
                const T column_gate = u.column_gate[j], column = u.gated_column[j];
                const V input = V{} + (Read ? x[j] : T(0));
                for (int k = 0; k < block; ++k) {
                    const V written = rows.written(k, C::load(old + k * width), column_gate, column);
                    C::store(written, now + k * width);
                    if constexpr (Read) sum[k] += written * input;
                }
            }
            if constexpr (Read)
                for (int k = 0; k < block; ++k) C::store(sum[k], sums + i + k * width);
        });
    }

    // x <- LN(tanh(sums)), and to `units` too, whose padding is zero.
    FASTWEIGHTS_OUTLINE void finish_layer(T* statistics, T* x, T* units) const {
        C::fill(pitch, sums, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return R::tanh(C::load(sums + i)); });
        // From one of the numbers, which is no further from the mean than all are spread, both sums are taken at once.
        const V origin = V{} + sums[0];
        const T share = T(1) / T(size);
        const V distance = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(sums + i) - origin;
        }) * share;
        const V square = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const V difference = C::load(sums + i) - origin;
            return difference * difference;
        }) * share;
        const V mean = origin + distance;
        const T inverse = T(1) / std::sqrt(std::max(square[0] - distance[0] * distance[0], T(0)) + T(problem.eps));
        statistics[0] = inverse;
        statistics[1] = mean[0];
        C::fill(pitch, units, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const V unit = R::head((C::load(sums + i) - mean) * inverse, size - i);
            C::store_head(unit, size - i, x + i);
            return unit;
        });
    }

    // sums <- F x, F written first with what the step before left of its update, if there was one.
    FASTWEIGHTS_INLINE void read(bool written, T* fast, Update u, int columns, const T* x) const {
        if (written) return write<true>(fast, u, columns, fast, x);
        std::fill(sums, sums + pitch, T(0));
        C::multiply(fast, x, columns, pitch, T(1), sums);
    }

    // Both matrices of this sequence, of tensors of which either may be null, into memory, zeros where they are not
    // `wanted`; and back.
    FASTWEIGHTS_OUTLINE void load_matrices(bool wanted, const T* of_1, const T* of_2, T* both) const {
        T* const of_second = both + std::int64_t(pitch) * columns_1;
        const std::int64_t before = episode->b * size;
        std::fill(both, both + matrices(), T(0));
        if (wanted && of_1) C::load_columns(of_1 + before * columns_1, size, columns_1, both, pitch);
        if (wanted && of_2) C::load_columns(of_2 + before * columns_2, size, columns_2, of_second, pitch);
    }
    FASTWEIGHTS_OUTLINE void store_matrices(const T* both, T* of_1, T* of_2) const {
        const T* const of_second = both + std::int64_t(pitch) * columns_1;
        const std::int64_t before = episode->b * size;
        if (of_1) C::store_columns(both, size, columns_1, pitch, of_1 + before * columns_1);
        if (of_2) C::store_columns(of_second, size, columns_2, pitch, of_2 + before * columns_2);
    }

    FASTWEIGHTS_INLINE void begin(const Episode& e) {
        episode = &e;
        length = e.length;
        load_matrices(e.is_given(), in.fast_1, in.fast_2, fast_1);
    }
    FASTWEIGHTS_INLINE void load_given(T* row) const {  // the hidden state with which the episode begins
        if (episode->is_given()) C::copy(in.hidden + episode->b * size, size, row);
        else std::fill(row, row + size, T(0));
    }

    FASTWEIGHTS_INLINE void forward(const Episode& e, const Episode& last, const FastResults<T>& out) {
        const std::int64_t end = last.b * problem.steps + last.begin + last.length;
        begin(e);
        load_given(x_1);
        // A layer's end is a chain of dependent steps: the processor squashes an update meanwhile. What was squashed is
        // not taken at once, for a register that lies across two that were just stored has to wait for both.
        const int both_1 = size + columns_1, both_2 = size + columns_2;
        T* squashed = line;
        for (std::int64_t t = 0; t < length; ++t) {
            const Inside inside = inside_of(t, out.inside);
            const T* const update = update_of(row_of(t), end);
            prefetch(in.x, t + 2, features);
            C::copy(at(in.x, t, features), features, x_1 + size);
            if (t > 0) take(squashed, columns_1, first);
            read(t > 0, fast_1, first, columns_1, x_1);
            finish_layer(inside.statistics, x_2, inside.units);
            if (t > 0) take(squashed + 2 * both_1, columns_2, second);
            if (out.squashed) squashed = updates_at(out.squashed, t);
            squash(update, in.bias, both_1, squashed);
            read(t > 0, fast_2, second, columns_2, x_2);
            finish_layer(inside.statistics + 2, x_1, sums);
            squash(update + 2 * both_1, in.bias + 2 * both_1, both_2, squashed + 2 * both_1);
            C::copy(x_1, size, at(out.outputs, t, size));
        }
        if (length > 0) {
            take(squashed, first, second);
            write<false>(fast_1, first, columns_1, fast_1);
            write<false>(fast_2, second, columns_2, fast_2);
        }
        for (std::int64_t t = length; t < e.span; ++t) std::memset(at(out.outputs, t, size), 0, size * sizeof(T));
        if (e.is_last(problem.steps)) store_matrices(fast_1, out.fast_1, out.fast_2);
    }
};

}  // namespace fastweights
