// The backward pass of the fast network, one sequence at a time.
//
// No step's fast matrices are kept by the forward pass: they are written again, a chunk of steps at a time, from the
// matrices at the chunk's beginning. Those before every second step are kept; the others are formed where they are read,
// which takes less time than to store them and to load them from a cache further off.
#pragma once

#include "gated_fast.hpp"

namespace fastweights {

template <class T, int Bytes>
struct BackwardFastSequence : FastSequence<T, Bytes> {
    using Base = FastSequence<T, Bytes>;
    using C = typename Base::C;
    using R = typename Base::R;
    using V = typename Base::V;
    using M = typename Base::M;
    using Inside = typename Base::Inside;
    using Update = typename Base::Update;
    using Base::arena, Base::at, Base::columns_1, Base::columns_2, Base::fast_1, Base::features, Base::first,
        Base::in, Base::inner, Base::length, Base::make_room, Base::matrices, Base::padded, Base::pitch,
        Base::problem, Base::row_of, Base::second, Base::size, Base::update_numbers, Base::updates, Base::updates_at,
        Base::weight, Base::width, Base::x_1, Base::x_2;

    static constexpr int most_rows = Base::most_rows;

    const int longest;  // steps of a chunk, an even number
    const int wide;     // numbers of an inner layer, a one behind them whose products are the bias's, and zeros
    T* const weight_sums;  // [U, wide]
    T *starts, *within, *carried;  // fast matrices: before each chunk, before every second step of one, and dL/dF
    T *grad, *pulled, *grad_x, *given, *column_sums, *terms;
    T *inners, *of_inners;                 // of the steps whose updates' gradients wait in `updates`
    std::int64_t waiting[most_rows];       // their rows of [B,T]
    int count_waiting = 0;
    Update earlier_first, earlier_second;  // of the step before that of `first` and `second`

    // Steps of a chunk: about the root of their number, so that the matrices kept are no more than that either.
    static int chunk_steps(std::int64_t steps) {
        int chunk = 32;
        while (std::int64_t(chunk) * chunk < steps) chunk += 8;
        return chunk;
    }
    static std::int64_t numbers(const FastProblem& p) {
        const std::int64_t chunk = chunk_steps(p.steps), size = padded(p.size), wide = padded(p.size + p.features + 1);
        const std::int64_t matrices = size * (2 * p.size + p.features + 2);
        return ((p.steps + chunk - 1) / chunk + chunk / 2 + 1) * matrices + 3 * size + 3 * wide +
               3 * Base::width * Base::width + Base::room(p) + 2 * most_rows * padded(p.inner + 1);
    }

    FASTWEIGHTS_INLINE BackwardFastSequence(const FastProblem& p, const FastInputs<T>& i, const FastShared<T>& shared,
                                            T* sums_of_weight)
        : Base(p, i, shared, numbers(p)), longest(chunk_steps(p.steps)), wide(padded(p.inner + 1)),
          weight_sums(sums_of_weight) {
        starts = arena.template take<T>((p.steps + longest - 1) / longest * matrices());
        within = arena.template take<T>(longest / 2 * matrices());
        carried = arena.template take<T>(matrices());
        grad = arena.template take_zeroed<T>(pitch);
        pulled = arena.template take_zeroed<T>(pitch);
        given = arena.template take_zeroed<T>(pitch);
        grad_x = arena.template take_zeroed<T>(padded(columns_1));
        column_sums = arena.template take_zeroed<T>(2 * padded(columns_1));
        terms = arena.template take_zeroed<T>(3 * width * width);
        make_room(earlier_first, earlier_second);
        inners = arena.template take_zeroed<T>(most_rows * wide);
        of_inners = arena.template take<T>(most_rows * wide);
        for (int n = 0; n < most_rows; ++n) inners[n * wide + inner] = T(1);
        std::fill(weight_sums, weight_sums + std::int64_t(update_numbers()) * wide, T(0));
    }

    // The products of the gradients that wait: with the weight to those of the inner layers, with these to the weight's.
    FASTWEIGHTS_OUTLINE void multiply_waiting(T* grad_inners) {
        const int count = std::exchange(count_waiting, 0), rows = update_numbers(), pitch = padded(rows);
        for (int n = 0; n < count; ++n) C::copy(in.inners + waiting[n] * inner, inner, inners + n * wide);
        M::template run_kind<Product<T>::whole>(
            {Product<T>::whole, count, wide, rows, updates, pitch, 1, weight, wide, of_inners, wide, false});
        M::template run_kind<Product<T>::whole>(
            {Product<T>::whole, rows, wide, count, updates, 1, pitch, inners, wide, weight_sums, wide, true});
        for (int n = 0; n < count; ++n) C::copy(of_inners + n * wide, inner, grad_inners + waiting[n] * inner);
    }

    std::int64_t to_second() const { return std::int64_t(pitch) * columns_1; }

    FASTWEIGHTS_INLINE void backward(const Episode& e, const FastResults<T>& from, const FastResults<T>& grads,
                                     const FastGradients<T>& out) {
        this->begin(e);
        this->load_matrices(e.is_last(problem.steps), grads.fast_1, grads.fast_2, carried);
        std::fill(grad_x, grad_x + pitch, T(0));
        if (length > 0) load_outputs(length - 1, from.outputs, grads.outputs);
        keep_starts(from.squashed);
        for (std::int64_t chunk = (length + longest - 1) / longest - 1; chunk >= 0; --chunk) {
            const std::int64_t begin = chunk * longest;
            const int count = static_cast<int>(std::min<std::int64_t>(longest, length - begin));
            T* const start = starts + chunk * matrices();
            const auto before = [&](int k) { return k == 0 ? start : within + (k / 2 - 1) * matrices(); };
            for (int k = 0; k + 2 < count; k += 2) write_two(begin + k, from.squashed, before(k), before(k + 2));
            for (int k = count - 1; k >= 0; --k) {
                const bool formed = k % 2;
                backward_step(formed, begin + k, before(k - formed), from, grads.outputs, out);
            }
        }
        for (std::int64_t t = length; t < e.span; ++t) {
            std::memset(out.inners + row_of(t) * inner, 0, inner * sizeof(T));
            std::memset(at(out.x, t, features), 0, features * sizeof(T));
        }
        if (e.begin > 0) return;
        if (e.anew) {  // nobody read the state that was given
            std::fill(grad_x, grad_x + pitch, T(0));
            std::fill(carried, carried + matrices(), T(0));
        }
        C::copy(grad_x, size, out.hidden + e.b * size);
        this->store_matrices(carried, out.fast_1, out.fast_2);
    }

    // Both matrices two steps on from before step t, from one place to another or the same.
    FASTWEIGHTS_INLINE void write_two(std::int64_t t, const T* squashed, const T* from, T* to) {
        this->take(updates_at(squashed, t), earlier_first, earlier_second);
        this->take(updates_at(squashed, t + 1), first, second);
        write_two(from, earlier_first, first, columns_1, to);
        write_two(from + to_second(), earlier_second, second, columns_2, to + to_second());
    }
    FASTWEIGHTS_OUTLINE void write_two(const T* from, Update u, Update v, int columns, T* to) const {
        const std::int64_t step = pitch;
        C::template for_panels<3>(pitch, [&](int i, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            const typename Base::template Rows<block> rows_u(u, i), rows_v(v, i);
            const T* old = from + i;
            T* now = to + i;
            for (int j = 0; j < columns; ++j, old += step, now += step) {
                const T gate_u = u.column_gate[j], column_u = u.gated_column[j];
                const T gate_v = v.column_gate[j], column_v = v.gated_column[j];
                for (int k = 0; k < block; ++k) {
                    const V between = rows_u.written(k, C::load(old + k * width), gate_u, column_u);
                    C::store(rows_v.written(k, between, gate_v, column_v), now + k * width);
                }
            }
        });
    }

    FASTWEIGHTS_OUTLINE void keep_starts(const T* squashed) {
        std::copy(fast_1, fast_1 + matrices(), starts);
        for (std::int64_t t = 0; t / longest < (length - 1) / longest; t += 2) {
            T* const start = starts + t / longest * matrices();
            const bool last = (t + 2) % longest == 0;
            write_two(t, squashed, t % longest == 0 ? start : fast_1, last ? start + matrices() : fast_1);
        }
    }

    // From dL/dh(t+1) in `grad_x` and dL/dF(t+1) in `carried` to those of step t. `fast` is what both matrices are before the
    // step or, where they are formed, before the step before it.
    FASTWEIGHTS_OUTLINE void backward_step(bool formed, std::int64_t t, const T* fast, const FastResults<T>& from,
                                           const T* grad_outputs, const FastGradients<T>& out) {
        const Inside inside = this->inside_of(t, from.inside);
        this->prefetch(from.outputs, t - 3, size);
        this->prefetch(in.x, t - 2, features);
        if (count_waiting == most_rows) multiply_waiting(out.inners);
        T* const update = updates + count_waiting * padded(update_numbers());
        waiting[count_waiting++] = row_of(t);
        C::prefetch(in.inners + row_of(t) * inner, inner);
        const T* const squashed = from.squashed;
        if (this->episode->b + 1 < problem.batch)  // what the next sequence will begin with
            C::prefetch(updates_at(squashed, t) + problem.steps * update_numbers(), update_numbers());
        this->take(updates_at(squashed, t), first, second);
        if (formed) this->take(updates_at(squashed, t - 1), earlier_first, earlier_second);
        C::fill(pitch, grad, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(grad_x + i) + C::load(given + i); });
        C::copy(inside.units, size, x_2);
        undo_layer(grad, x_1, inside.statistics + 2);
        undo_write(formed, fast + to_second(), earlier_second, carried + to_second(), second, x_2, columns_2,
                   update + 2 * (size + columns_1));
        undo_layer(grad_x, inside.units, inside.statistics);
        if (t == 0) this->load_given(x_1);
        else load_outputs(t - 1, from.outputs, grad_outputs);
        C::copy(at(in.x, t, features), features, x_1 + size);
        undo_write(formed, fast, earlier_first, carried, first, x_1, columns_1, update);
        C::copy(grad_x + size, features, at(out.x, t, features));
    }

    // The outputs of a step, which the step after it read too, and the gradient that is given for them, long before they
    // are read as whole registers: a load across two stores has to wait for both.
    FASTWEIGHTS_OUTLINE void load_outputs(std::int64_t t, const T* outputs, const T* grad_outputs) {
        C::copy(at(outputs, t, size), size, x_1);
        if (!grad_outputs) return;
        this->prefetch(grad_outputs, t - 1, size);
        C::copy(at(grad_outputs, t, size), size, given);
    }

    // pulled <- the gradient of F x from that of LN(tanh(F x)) = normal.
    FASTWEIGHTS_OUTLINE void undo_layer(const T* grad, const T* normal, const T* statistics) {
        const T inverse = statistics[0], mean = statistics[1], deviation = T(1) / inverse, share = T(1) / T(size);
        const V center = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA { return C::load(grad + i); }) * share;
        const V along = C::sum_of(size, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            return C::load(grad + i) * C::load(normal + i);
        }) * share;
        C::fill(pitch, pulled, [&](int i) FASTWEIGHTS_INLINE_LAMBDA {
            const V value = C::load(normal + i) * deviation + mean;
            const V pull = (C::load(grad + i) - center - along * C::load(normal + i)) * inverse * (T(1) - value * value);
            return R::head(pull, size - i);
        });
    }

    // For the read F x with gradient `pulled`, and F <- G * H + (1 - G) * F after it: `carried` from dL/d(new F) to dL/dF,
    // the gradient of x into grad_x, and that of the update's parts, before their tanh and sigmoid, to `out`.
    //
    // With C = dL/d(new F) times the row's gate, every sum that the parts need is one of C and of C * F along a row or a
    // column.
    template <bool Formed>
    FASTWEIGHTS_OUTLINE void undo_write(const T* fast, Update earlier, T* carried, Update u, const T* x, int columns,
                                        T* out) {
        constexpr int square = width * width;
        const std::int64_t step = pitch;
        T* const terms = this->terms;
        T *const by_row = column_sums, *const gated = by_row + padded(columns_1);  // sums along the columns
        C::template for_panels<3>(pitch, [&](int i, auto block) FASTWEIGHTS_INLINE_LAMBDA {
            const typename Base::template Rows<block> before(earlier, i);
            V along[block] = {}, against[block] = {}, row_gate[block], row[block], pull[block];
            for (int k = 0; k < block; ++k) {
                row_gate[k] = C::load(u.row_gate + i + k * width);
                row[k] = C::load(u.row + i + k * width);
                pull[k] = C::load(pulled + i + k * width);
            }
            const T* there = fast + i;
            T* place = carried + i;
            for (int j0 = 0; j0 < columns; j0 += width) {
                T* term = terms;
                for (int j = j0; j < columns && j < j0 + width; ++j, there += step, place += step, term += width) {
                    const T gate = u.column_gate[j], gated_column = u.gated_column[j], input = x[j];
                    const T earlier_gate = earlier.column_gate[j], earlier_column = earlier.gated_column[j];
                    V of_row = {}, of_gate = {}, of_x = {};
                    for (int k = 0; k < block; ++k) {
                        const V old = C::load(place + k * width), kept = C::load(there + k * width);
                        const V f = Formed ? before.written(k, kept, earlier_gate, earlier_column) : kept;
                        const V c = old * row_gate[k], cf = c * f;
                        along[k] += c * gated_column;
                        against[k] += cf * gate;
                        of_row += c * row[k];
                        of_gate += cf;
                        of_x += f * pull[k];
                        C::store((old - c * gate) + pull[k] * input, place + k * width);
                    }
                    C::store(of_row, term);
                    C::store(of_gate, term + square);
                    C::store(of_x, term + 2 * square);
                }
                add_lanes(terms, i > 0, by_row + j0);
                add_lanes(terms + square, i > 0, gated + j0);
                add_lanes(terms + 2 * square, i > 0, grad_x + j0);
            }
            for (int k = 0; k < block; ++k) {
                const int at = i + k * width;
                C::store_head(along[k] * (T(1) - row[k] * row[k]), size - at, out + at);
                C::store_head((row[k] * along[k] - against[k]) * (T(1) - row_gate[k]), size - at, out + size + columns + at);
            }
        });
        for (int j = 0; j < columns; j += width) {
            // What is read past the last column is not stored; past the last row of all lies the inside of steps.
            const V value = C::load(u.column + j), g = C::load(u.column_gate + j), sum = C::load(by_row + j);
            C::store_head(g * sum * (T(1) - value * value), columns - j, out + size + j);
            C::store_head((value * sum - C::load(gated + j)) * g * (T(1) - g), columns - j, out + 2 * size + columns + j);
        }
    }

    FASTWEIGHTS_INLINE void undo_write(bool formed, const T* fast, Update earlier, T* carried, Update u, const T* x,
                                       int columns, T* out) {
        if (formed) undo_write<true>(fast, earlier, carried, u, x, columns, out);
        else undo_write<false>(fast, earlier, carried, u, x, columns, out);
    }

    // The sums over the lanes of `width` registers, to what another panel of rows gave where there was one.
    static FASTWEIGHTS_INLINE void add_lanes(const T* lanes, bool more, T* sums) {
        V block[width];
        for (int k = 0; k < width; ++k) block[k] = C::load(lanes + k * width);
        const V sum = R::sums_of(block);
        C::store(more ? C::load(sums) + sum : sum, sums);
    }
};

}  // namespace fastweights
